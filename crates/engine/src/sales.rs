//! Sales as visitors see them, and as an operator edits them. Up goes ledger first, then the gate.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, PoisonError, RwLock};

use stampede_core::ports::Snapshot;
use stampede_core::ports::{CreateOutcome, EditOutcome, OrderRow, SaleDraft};
use stampede_core::{Code, NewSale, OrderId, Refusal, Sale, SaleId, SaleState, SaleStatus, Timestamp, UserId, shop};

use crate::audit::Outcome;
use crate::commit::describe;
use crate::engine::{Engine, is_long_over};
use crate::error::Error;

/// A sale and what remains of it now.
#[derive(Debug, Clone)]
pub struct SaleView {
    pub sale: Arc<Sale>,
    /// `None` for a draft.
    pub state: Option<SaleState>,
    pub remaining: u32,
}

/// How many sales one look goes through.
const MAX_LOOK: usize = 1000;

/// The sales there are, in memory: a crowd that looks does not reach the ledger.
#[derive(Debug, Default)]
pub(crate) struct SaleIndex {
    sales: RwLock<BTreeMap<SaleId, Arc<Sale>>>,
}

impl SaleIndex {
    pub(crate) fn put(&self, sale: Sale) {
        let mut sales = self.sales.write().unwrap_or_else(PoisonError::into_inner);
        let newer = sales.get(&sale.id).is_none_or(|held| held.ver <= sale.ver);
        if newer {
            sales.insert(sale.id, Arc::new(sale));
        }
    }

    fn get(&self, id: SaleId) -> Option<Arc<Sale>> {
        self.sales.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Newest first, those below `before`; at most so many that a look at them is short.
    fn newest(&self, before: Option<SaleId>) -> Vec<Arc<Sale>> {
        let sales = self.sales.read().unwrap_or_else(PoisonError::into_inner);
        let below = (Bound::Unbounded, before.map_or(Bound::Unbounded, Bound::Excluded));
        sales.range(below).rev().take(MAX_LOOK).map(|(_, sale)| sale.clone()).collect()
    }
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
            Err(nobody) => {
                let sale = self.made_elsewhere(id).await?.ok_or(nobody)?;
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

    /// What the gate holds of a sale now, and a digest over its marks.
    pub fn gate_of(&self, id: SaleId) -> Result<(Snapshot, u64), Error> {
        let nobody = Error::Refused(Refusal::NoSuchSale);
        self.gate.digest(id).ok_or(nobody)
    }

    /// The marks that the gate holds of a sale now, by rising user, those above `after`.
    pub fn marks_of(&self, id: SaleId, after: Option<UserId>, limit: usize) -> Result<Vec<(UserId, OrderId)>, Error> {
        self.gate.snapshot(id).ok_or(Error::Refused(Refusal::NoSuchSale))?;
        let mut marks = self.gate.marks(id);
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
        let remaining = self.gate.snapshot(sale.id).map_or(0, |snapshot| snapshot.remaining());
        let state = SaleState::of(sale.status, sale.window, now, remaining);
        SaleView { sale, state, remaining }
    }

    /// A sale that another process has made a moment ago, opened here too. Whoever asks for it, the ledger is asked once.
    pub(crate) async fn made_elsewhere(&self, id: SaleId) -> Result<Option<Arc<Sale>>, Error> {
        let Some(sales) = &self.catalogue_cache.sales else { return Ok(None) };
        let (ledger, gate, clock) = (self.stores.ledger.clone(), self.gate.clone(), self.clock.clone());
        let load = async move || {
            let Some(loaded) = ledger.load(id).await? else { return Ok(None) };
            let sale = loaded.sale.clone();
            if !is_long_over(&sale, clock.now()) {
                gate.open(loaded);
            }
            Ok(Some(sale))
        };
        let sale = sales.get_or_load(&id, load).await?;
        if let Some(sale) = &sale {
            self.sale_index.put(Sale::clone(sale));
        }
        Ok(sale)
    }

    pub async fn create_sale(&self, new: NewSale) -> Result<SaleView, Error> {
        new.check().map_err(Error::Invalid)?;
        let id = self.next_id(SaleId::new)?;
        let (voucher, window) = (new.voucher_id, new.window());
        let draft = SaleDraft { id, voucher, stock: new.stock, window, status: new.status };
        match self.stores.ledger.create_sale(draft, self.clock.now()).await? {
            CreateOutcome::Created => {}
            CreateOutcome::ParentMissing => return Err(Error::Plain(Code::NoSuchVoucher)),
            CreateOutcome::AlreadyExists => return Err(Error::Plain(Code::SaleExists)),
        }
        // It is made: a failure from here on is not "nothing was done".
        let loaded = self.stores.ledger.load(id).await.map_err(|error| {
            tracing::error!(sale = %id, error = describe(&error), "a sale was made but cannot be read");
            Error::OutcomeUnknown
        })?;
        let loaded = loaded.ok_or(Error::Plain(Code::Internal))?;
        let sale = loaded.sale.clone();
        if !self.is_long_over(&sale) {
            self.gate.open(loaded);
        }
        self.sale_index.put(sale);
        self.any_sale(id)
    }

    /// Publish, pause, resume, end.
    pub async fn set_sale_status(&self, id: SaleId, status: SaleStatus) -> Result<Outcome<SaleView>, Error> {
        let edited = self.stores.ledger.set_status(id, status).await?;
        self.apply(id, edited, |from| format!("a sale that is {} cannot become {}", from.as_str(), status.as_str()))
    }

    /// Adds stock, once per request id.
    pub async fn top_up(&self, id: SaleId, add: u32, request_id: &str) -> Result<Outcome<SaleView>, Error> {
        shop::check_top_up(add).map_err(Error::Invalid)?;
        let edited = self.stores.ledger.top_up(id, add, request_id, self.clock.now()).await?;
        self.apply(id, edited, |status| match status {
            SaleStatus::Ended => "the sale has ended".to_owned(),
            _ => format!("a sale has at most {} in all", shop::MAX_STOCK),
        })
    }

    /// Brings an edit of the ledger to the gate. `reason` says why it is not legal for a sale of this status.
    fn apply(
        &self,
        id: SaleId,
        edited: EditOutcome,
        reason: impl FnOnce(SaleStatus) -> String,
    ) -> Result<Outcome<SaleView>, Error> {
        let show = |sale: Sale| {
            self.gate.edit(&sale);
            self.sale_index.put(sale);
            self.any_sale(id)
        };
        match edited {
            EditOutcome::Done { before, after } => Ok(Outcome::edited(show(after.clone())?, &before, &after)),
            EditOutcome::Repeated(sale) => Ok(Outcome::unchanged(show(sale)?)),
            EditOutcome::NoSuchSale => Err(Error::Refused(Refusal::NoSuchSale)),
            EditOutcome::Illegal(status) => Err(Error::Illegal(reason(status))),
            EditOutcome::RequestIdReused => Err(Error::Plain(Code::RequestIdReused)),
        }
    }
}
