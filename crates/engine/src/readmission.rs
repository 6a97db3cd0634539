//! Readmission: a payment whose order was cancelled before it arrived pays a new order of the same buyer, if the gate admits one.
//!
//! The old order stays cancelled. The new one is bought as any other is, so what the gate and the ledger promise holds: stock that was returned
//! may have been sold to someone else, and is not sold twice. Meanwhile the payment is held in the ledger. It is moved to the new order, or
//! its hold ends and it is returned; the ledger sees to it that one of the two happens, and once. A node that dies, or does not get answers,
//! leaves a payment whose hold ends by itself, and perhaps an unpaid order that expires as any other does.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use stampede_core::{Code, Order, OrderId, Payment, ReportedPayment, SaleId, UserId, failpoint};

use crate::buy::Bought;
use crate::engine::Engine;
use crate::error::{Error, describe};

/// How long a payment is held, as a multiple of the answer timeout: buying takes at most one, and the ledger may be slow before and after it.
const HOLD: u32 = 6;
/// How long it may take to record an order that is no longer wanted, so that it is cancelled.
const LONGEST_RECORDING: Duration = Duration::from_secs(600);
/// The pause until the ledger is asked again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Engine {
    /// How long a payment may wait for its new order.
    pub(crate) const fn hold(&self) -> Duration {
        self.answer_timeout.saturating_mul(HOLD)
    }

    /// Lets a payment that is held, for an order that has ended, pay a new order, or has it returned. Returns the payment as it is then.
    pub(crate) async fn readmit(self: &Arc<Self>, reported: &ReportedPayment, ended: &Order) -> Result<Payment, Error> {
        let ledger = &self.stores.ledger;
        let new = self.buy_again(ended).await;
        if new.is_some() {
            failpoint::hit("payments.readmitted");
        }
        // If the ledger fails here, the payment may have been moved. Otherwise its hold ends by itself.
        let is_moved = match new {
            Some(new) => ledger.move_payment(reported, new, self.clock.now()).await?,
            None => false,
        };
        if is_moved {
            counter!("stampede_payments_readmitted_total").increment(1);
        } else {
            ledger.end_hold(reported, self.clock.now()).await?;
            if let Some(new) = new {
                self.cancel_unused(new).await;
            }
        }
        let payment = ledger.payment(&reported.provider, &reported.transaction).await?;
        payment.ok_or(Error::Plain(Code::Internal))
    }

    /// A new order of the buyer that the ledger has; `None` if there is none, if it is not known in time, or if the buyer has bought again
    /// meanwhile: that order is theirs to pay. An order that is recorded too late is cancelled then.
    async fn buy_again(self: &Arc<Self>, ended: &Order) -> Option<OrderId> {
        let mut accepted = None;
        let buying = async {
            // The owner of a disabled account could not use the order.
            let account = self.stores.accounts.account(ended.user).await?;
            if account.is_none_or(|account| account.disabled) {
                return Ok(None);
            }
            match self.buy(ended.sale, ended.user).await? {
                Bought::Created(order) => Ok::<_, Error>(Some(order.id)),
                Bought::Accepted { id, already: false } => {
                    accepted = Some(id);
                    let recorded = self.watch_order(id, ended.user, Some(ended.sale)).await?.recorded().await;
                    Ok(recorded.map(|order| order.id))
                }
                Bought::Already(_) | Bought::Accepted { already: true, .. } => Ok(None),
            }
        };
        let bought = tokio::time::timeout(self.answer_timeout, buying).await;
        let bought = bought.unwrap_or(Err(Error::OutcomeUnknown)).unwrap_or_else(|error| {
            tracing::info!(order = %ended.id, error = describe(&error), "a late payment finds no new order and is returned");
            None
        });
        if let (None, Some(unrecorded)) = (bought, accepted) {
            tokio::spawn(self.clone().cancel_once_recorded(unrecorded, ended.user, ended.sale));
        }
        bought
    }

    /// Waits for an order whose payment is returned because the order was not recorded in time, and cancels it. If the node stops before that, the order
    /// is the buyer's, and expires as any other does.
    async fn cancel_once_recorded(self: Arc<Self>, id: OrderId, user: UserId, sale: SaleId) {
        let recorded = async {
            loop {
                match self.watch_order(id, user, Some(sale)).await {
                    Ok(watch) => return watch.recorded().await,
                    // It was never recorded.
                    Err(Error::Plain(Code::NoSuchOrder)) => return None,
                    Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
                }
            }
        };
        match tokio::time::timeout(LONGEST_RECORDING, recorded).await {
            Ok(Some(_)) => self.cancel_unused(id).await,
            Ok(None) => {}
            Err(_) => {
                tracing::warn!(order = %id, "an order whose payment is returned is not recorded yet; it will expire");
            }
        }
    }

    /// Cancels the new order of a payment that was not moved to it, so that its stock is sold before it expires.
    async fn cancel_unused(&self, id: OrderId) {
        let cancelled = async { self.release(self.stores.ledger.cancel_readmitted(id, self.clock.now()).await?).await };
        match cancelled.await {
            // Its buyer has paid it otherwise, or cancelled it, or the ledger has rejected it.
            Ok(_) | Err(Error::Plain(Code::IllegalStep)) => {}
            Err(error) => {
                tracing::warn!(order = %id, error = describe(&error), "cannot cancel an order whose payment is returned; it will expire");
            }
        }
    }
}
