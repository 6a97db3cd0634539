//! Sales as visitors see them and as administrators edit them. An edit is committed in the ledger first, then applied to the gate.

use std::sync::Arc;

use stampede_core::ids::Origin;
use stampede_core::ports::{CreateOutcome, EditOutcome, GateError, OrderRow, SaleDraft, Snapshot};
use stampede_core::{
    Code, NewSale, OrderId, Refusal, Sale, SaleId, SaleState, SaleStatus, Timestamp, UserId, WindowChange, failpoint,
    shop,
};

use crate::audit::Outcome;
use crate::engine::Engine;
use crate::error::{Error, describe};
use crate::reduction;
use crate::retention::is_past_retention;

/// A sale and what remains of it now.
#[derive(Debug, Clone)]
pub struct SaleView {
    pub sale: Arc<Sale>,
    /// `None` for a draft.
    pub state: Option<SaleState>,
    pub remaining: u32,
}

impl Engine {
    /// The sales that visitors may see, newest first.
    pub fn sales(&self, state: Option<SaleState>, before: Option<SaleId>, limit: usize) -> Vec<SaleView> {
        let now = self.clock.now();
        let visible = self.sale_index.newest(before).into_iter().map(|sale| self.view(sale, now));
        visible.filter(|view| view.state.is_some() && (state.is_none() || view.state == state)).take(limit).collect()
    }

    /// One sale that visitors may see, also if another process has made it a moment ago.
    pub async fn sale(&self, id: SaleId) -> Result<SaleView, Error> {
        let view = match self.any_sale(id) {
            Ok(view) => view,
            Err(missing) => {
                let sale = self.find_in_ledger(id).await?.ok_or(missing)?;
                self.view(sale, self.clock.now())
            }
        };
        if view.state.is_some() { Ok(view) } else { Err(Error::Refused(Refusal::NoSuchSale)) }
    }

    /// One sale, a draft too.
    pub fn any_sale(&self, id: SaleId) -> Result<SaleView, Error> {
        let sale = self.sale_index.get(id).ok_or(Error::Refused(Refusal::NoSuchSale))?;
        Ok(self.view(sale, self.clock.now()))
    }

    /// All sales, drafts too, newest first.
    pub fn all_sales(&self, before: Option<SaleId>, limit: usize) -> Vec<SaleView> {
        let now = self.clock.now();
        self.sale_index.newest(before).into_iter().take(limit).map(|sale| self.view(sale, now)).collect()
    }

    /// How many messages of all sales wait in a queue outside the gate; `None` in tiers without one.
    pub async fn queue_depth(&self) -> Result<Option<u64>, Error> {
        self.tier.queue_depth().await
    }

    /// The state of a sale in the gate, and a digest over its marks.
    pub async fn gate_snapshot(&self, id: SaleId) -> Result<(Snapshot, u64), Error> {
        self.tier.gate().digest(id).await?.ok_or(Error::Refused(Refusal::NoSuchSale))
    }

    /// The marks of a sale in the gate, of users above `after`, by rising user.
    pub async fn marks(
        &self,
        id: SaleId,
        after: Option<UserId>,
        limit: usize,
    ) -> Result<Vec<(UserId, OrderId)>, Error> {
        let mut marks = self.tier.gate().marks(id).await?.ok_or(Error::Refused(Refusal::NoSuchSale))?;
        marks.retain(|(user, _)| after.is_none_or(|after| *user > after));
        marks.sort_unstable();
        marks.truncate(limit);
        Ok(marks)
    }

    /// The orders of a sale, dead ones too, for an administrator.
    pub async fn orders_in(&self, id: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>, Error> {
        self.any_sale(id)?;
        Ok(self.stores.ledger.orders_in(id, after, limit).await?)
    }

    fn view(&self, sale: Arc<Sale>, now: Timestamp) -> SaleView {
        // While the gate does not have the sale, the ledger's count of a moment ago is the best there is.
        let remaining = self.tier.remaining(sale.id).unwrap_or_else(|| sale.total.saturating_sub(sale.sold));
        let state = SaleState::of(sale.status, sale.window, now, remaining);
        SaleView { sale, state, remaining }
    }

    /// A sale that another process has created a moment ago. It is opened here, too. An id tells when it was made, so those of other times
    /// cost nothing. Concurrent calls ask the ledger once, and in tiers with Redis a filter of all sales rules out ids that do not exist.
    pub(crate) async fn find_in_ledger(&self, id: SaleId) -> Result<Option<Arc<Sale>>, Error> {
        let Some(sales) = &self.catalogue_cache.sales else { return Ok(None) };
        if self.tier.has_sales_of(Origin::of(id.get(), self.clock.now()).at()) {
            return Ok(None);
        }
        let tier = self.tier.clone();
        if sales.get(&id, async move || tier.discover(id).await).await?.is_none() {
            return Ok(None);
        }
        if self.sale_index.get(id).is_none() {
            // Another node has read it: this one must open it as well.
            self.tier.discover(id).await?;
        }
        Ok(self.sale_index.get(id))
    }

    pub async fn create_sale(&self, new: NewSale) -> Result<SaleView, Error> {
        new.check().map_err(Error::Invalid)?;
        let id = self.next_id(SaleId::new)?;
        let (voucher, window) = (new.voucher_id, new.window());
        let payment_deadline_ms = new.payment_deadline_ms.unwrap_or(self.payment_deadline_ms);
        let buy_again = new.buy_again.unwrap_or(self.buy_again);
        let draft =
            SaleDraft { id, voucher, stock: new.stock, window, status: new.status, payment_deadline_ms, buy_again };
        let (ledger, now) = (self.stores.ledger.clone(), self.clock.now());
        let creating = async move { ledger.create_sale(draft, now).await };
        let created = match &self.catalogue_cache.sales {
            Some(sales) => sales.create(&id, creating).await?,
            None => creating.await?,
        };
        match created {
            CreateOutcome::Created => {}
            CreateOutcome::ParentMissing => return Err(Error::Plain(Code::NoSuchVoucher)),
            CreateOutcome::AlreadyExists => return Err(Error::Plain(Code::SaleExists)),
        }
        failpoint::hit("sale.created");
        // The sale is created, so after a failure from here on the outcome is not known.
        let opened = self.tier.open_created(id).await.map_err(|error| {
            tracing::error!(sale = %id, error = describe(&error), "a sale was created but cannot be opened yet");
            Error::OutcomeUnknown
        })?;
        self.sale_index.put(opened.ok_or(Error::Plain(Code::Internal))?);
        self.any_sale(id)
    }

    /// Publish, pause, resume, end. Once per request id, if there is one.
    pub async fn set_sale_status(
        &self,
        id: SaleId,
        status: SaleStatus,
        request_id: Option<&str>,
    ) -> Result<Outcome<SaleView>, Error> {
        let now = self.tier.gate_time().await?;
        let edited = self.stores.ledger.set_status(id, status, request_id, now).await?;
        self.apply(id, edited, |from| format!("a sale that is {} cannot become {}", from.as_str(), status.as_str()))
            .await
    }

    /// Changes when a sale begins and ends, once per request id.
    pub async fn set_sale_window(
        &self,
        id: SaleId,
        change: WindowChange,
        request_id: &str,
    ) -> Result<Outcome<SaleView>, Error> {
        shop::check_window_change(change).map_err(Error::Invalid)?;
        let now = self.tier.gate_time().await?;
        let edited = self.stores.ledger.set_window(id, change, request_id, now).await?;
        self.apply(id, edited, |status| format!("a sale that is {} keeps its window", status.as_str())).await
    }

    /// Adds stock, once per request id.
    pub async fn top_up(&self, id: SaleId, add: u32, request_id: &str) -> Result<Outcome<SaleView>, Error> {
        shop::check_top_up(add).map_err(Error::Invalid)?;
        let edited = self.stores.ledger.top_up(id, add, request_id, self.clock.now()).await?;
        self.apply(id, edited, |status| match status {
            SaleStatus::Ended => "the sale has ended".to_owned(),
            _ => format!("a sale has at most {} in all", shop::MAX_STOCK),
        })
        .await
    }

    /// Takes stock away, once per request id: as much as is not sold.
    pub async fn reduce(&self, id: SaleId, remove: u32, request_id: &str) -> Result<Outcome<SaleView>, Error> {
        shop::check_reduction(remove).map_err(Error::Invalid)?;
        let edited = self.stores.ledger.reduce(id, remove, request_id, self.clock.now()).await?;
        if matches!(edited, EditOutcome::Done { .. }) {
            failpoint::hit("reduce.ledger");
        }
        self.apply(id, edited, |status| match status {
            SaleStatus::Ended => "the sale has ended".to_owned(),
            _ => "the sale does not have so many".to_owned(),
        })
        .await
    }

    /// Applies an edit of the ledger to the gate. `reason` says why it is not legal for a sale of this status.
    async fn apply(
        &self,
        id: SaleId,
        edited: EditOutcome,
        reason: impl FnOnce(SaleStatus) -> String + Send,
    ) -> Result<Outcome<SaleView>, Error> {
        let (sale, before) = match edited {
            EditOutcome::Done { before, after } => (after, Some(before)),
            EditOutcome::Repeated(sale) => (sale, None),
            EditOutcome::NoSuchSale => return Err(Error::Refused(Refusal::NoSuchSale)),
            EditOutcome::Illegal(status) => return Err(Error::Illegal(reason(status))),
            EditOutcome::IllegalWindow(fault) => return Err(Error::Illegal(fault.to_string())),
            EditOutcome::RequestIdReused => return Err(Error::Plain(Code::RequestIdReused)),
        };
        failpoint::hit("sale.edited");
        // The ledger has the edit, so after a failure of the gate the outcome is not known. Repeating the request applies it.
        let cap = match self.tier.gate().edit(&sale).await {
            // A sale that is long over is no longer in the gate.
            Err(GateError::NotOpen) if is_past_retention(&sale, self.clock.now()) => None,
            edited => edited.map_err(|_| Error::OutcomeUnknown)?,
        };
        self.note_applied(id, sale.version).await;
        // What remains is shown in the answer. If the gate cannot be asked, that is what this node has last heard.
        if cap.is_some()
            && let Err(error) = self.tier.gate().snapshot(id).await
        {
            tracing::debug!(sale = %id, %error, "cannot read what remains of an edited sale");
        }
        let completed = reduction::complete(self.stores.ledger.as_ref(), sale, cap, self.clock.now()).await;
        let sale = completed.map_err(|_| Error::OutcomeUnknown)?;
        self.sale_index.put(sale.clone());
        let view = self.any_sale(id)?;
        Ok(match before {
            Some(before) => Outcome::edited(view, &before, &sale),
            None => Outcome::unchanged(view),
        })
    }

    /// Notes that the gate has the edits of a sale up to this version. If that fails, the next round of any process does it.
    async fn note_applied(&self, id: SaleId, version: i64) {
        failpoint::hit("edit.gate");
        let noting = async {
            let now = self.tier.gate_time().await?;
            Ok::<_, Error>(self.stores.ledger.note_applied_edits(id, version, now).await?)
        };
        if let Err(error) = noting.await {
            tracing::debug!(sale = %id, error = describe(&error), "cannot note yet that the gate has an edit");
        }
    }
}
