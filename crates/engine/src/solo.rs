//! The tier `solo`: one process decides, one ledger remembers.
//!
//! The buying path: the keyed guard lets one try of a person through at a time; the gate in memory admits or refuses at once;
//! who is admitted goes into the sale's batch, and hears 201 after the ledger has committed it.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use stampede_core::ids::IdMaker;
use stampede_core::ports::{Admitted, Decision, Ledger, RecordOutcome};
use stampede_core::{
    Admission, Clock, Code, Order, OrderId, OrderStatus, Refusal, RejectReason, SaleId, UserId, failpoint,
};
use stampede_gate::MemoryGate;
use stampede_lock::KeyedMutex;
use tokio::sync::Semaphore;

use crate::batcher::{Abandoned, Batcher, Options, Ticket};
use crate::commit::{CommitOutcome, Committer, Pending};
use crate::error::Error;
use crate::recording::Recording;
use crate::task::AbortOnDrop;

/// The order that the buyer has now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bought {
    pub order: Order,
    /// It was the buyer's before this try.
    pub already: bool,
}

#[derive(Debug, Clone, Copy)]
pub struct SoloConfig {
    /// How long a buyer waits for a yes or no before hearing that it is not known yet.
    pub answer_timeout: Duration,
    pub max_batch: usize,
    /// How many orders of one sale may wait for the ledger.
    pub queue_per_sale: usize,
    /// How many orders of all sales may wait for the ledger.
    pub queue_total: usize,
    /// An order that cannot be recorded goes into quarantine after so long at the earliest.
    pub quarantine_after: Duration,
}

#[derive(Debug)]
pub struct Solo {
    config: SoloConfig,
    ledger: Arc<dyn Ledger>,
    gate: Arc<MemoryGate>,
    clock: Arc<dyn Clock>,
    ids: Arc<dyn IdMaker>,
    guards: KeyedMutex<(UserId, SaleId)>,
    places: Arc<Semaphore>,
    /// A committer per sale that has sold something; `None` once closed.
    committers: RwLock<Option<HashMap<SaleId, SaleCommitter>>>,
}

/// Where the orders of one sale are settled.
#[derive(Debug)]
struct SaleCommitter {
    commit: Arc<Committer>,
    batch: Batcher<Pending, CommitOutcome>,
    /// Tries orders again that could not be recorded.
    retrying: AbortOnDrop,
}

impl SaleCommitter {
    /// Returns when everything that was admitted is settled, as far as that can be.
    async fn close(self) {
        let Self { commit, batch, retrying } = self;
        batch.close().await;
        drop(retrying);
        commit.close().await;
    }
}

/// What a try came to.
enum Tried {
    Bought(Bought),
    /// The mark in the way belonged to a dead order and is gone: once more.
    Again,
}

impl Solo {
    pub fn new(
        config: SoloConfig,
        ledger: Arc<dyn Ledger>,
        gate: Arc<MemoryGate>,
        clock: Arc<dyn Clock>,
        ids: Arc<dyn IdMaker>,
    ) -> Self {
        let places = Arc::new(Semaphore::new(config.queue_total));
        let committers = RwLock::new(Some(HashMap::new()));
        Self { config, ledger, gate, clock, ids, guards: KeyedMutex::new(), places, committers }
    }

    pub(crate) const fn answer_timeout(&self) -> Duration {
        self.config.answer_timeout
    }

    /// One for this user, or the one he has.
    pub async fn buy(&self, sale: SaleId, user: UserId) -> Result<Bought, Error> {
        let deciding = async {
            let _turn = self.guards.lock((user, sale)).await;
            // A second round only after a dead mark was cleared away; more would mean that something else goes on.
            for _ in 0..2 {
                if let Tried::Bought(bought) = self.try_buy(sale, user).await? {
                    return Ok(bought);
                }
            }
            Err(Error::OutcomeUnknown)
        };
        let bought = tokio::time::timeout(self.config.answer_timeout, deciding).await;
        let bought = bought.unwrap_or(Err(Error::OutcomeUnknown))?;
        failpoint::hit("buy.answer");
        Ok(bought)
    }

    async fn try_buy(&self, sale: SaleId, user: UserId) -> Result<Tried, Error> {
        let order = OrderId::new(self.ids.next()?).map_err(|_| Error::Plain(Code::Internal))?;
        let Some(pass) = self.gate.admit(sale, user, order, self.clock.now()) else {
            return Err(Error::Refused(Refusal::NoSuchSale));
        };
        match pass.admission {
            Admission::Refused(refusal) => Err(Error::Refused(refusal)),
            Admission::Admitted(order) => {
                failpoint::hit("buy.admitted");
                // No await between the mark and the batch: a caller that goes away cannot leave a mark behind.
                let ticket = self.submit(sale, user, order, pass).inspect_err(|_| {
                    self.gate.release(sale, user, order, None);
                })?;
                let outcome = if failpoint::planted("answer-early") {
                    CommitOutcome::Known(RecordOutcome::Inserted)
                } else {
                    ticket.await.map_err(|_| Error::OutcomeUnknown)?
                };
                if outcome == CommitOutcome::Known(RecordOutcome::Inserted) {
                    let Decision { price, at, .. } = pass;
                    let status = OrderStatus::Unpaid;
                    let order = Order { id: order, sale, user, status, price, created_at: at, updated_at: at };
                    return Ok(Tried::Bought(Bought { order, already: false }));
                }
                self.answer(user, order, outcome, false).await
            }
            Admission::AlreadyHas(held) => self.answer_held(sale, user, held, pass).await,
        }
    }

    /// The answer for somebody who has a mark. A mark alone is no promise: only a row is.
    async fn answer_held(&self, sale: SaleId, user: UserId, held: OrderId, pass: Decision) -> Result<Tried, Error> {
        match self.ledger.order(held).await? {
            Some(order) if order.status.is_live() => Ok(Tried::Bought(Bought { order, already: true })),
            Some(_dead) => {
                self.gate.release(sale, user, held, None);
                Ok(Tried::Again)
            }
            None => {
                // On its way, or its caller went away: roll it forward under its own id, then see what it is.
                let ticket = self.submit(sale, user, held, pass)?;
                let outcome = ticket.await.map_err(|_| Error::OutcomeUnknown)?;
                self.answer(user, held, outcome, true).await
            }
        }
    }

    /// The answer where the ledger has more to say than "recorded, just now".
    async fn answer(&self, user: UserId, id: OrderId, outcome: CommitOutcome, already: bool) -> Result<Tried, Error> {
        let recorded = match outcome {
            CommitOutcome::Known(recorded) => recorded,
            CommitOutcome::Undecided => return Err(Error::OutcomeUnknown),
        };
        match recorded {
            // Recorded by an earlier call that was not answered, or by a try that rolled it forward: the row tells.
            RecordOutcome::Inserted | RecordOutcome::AlreadyRecorded => self.look_up(id, user, already).await,
            RecordOutcome::Rejected { reason: RejectReason::AlreadyHas, existing: Some(existing) } => {
                self.look_up(existing, user, true).await
            }
            RecordOutcome::Rejected { reason: RejectReason::SoldOut, .. } => Err(Error::Refused(Refusal::SoldOut)),
            RecordOutcome::Rejected { .. } => Err(Error::Busy),
            RecordOutcome::Dead | RecordOutcome::IdCollision => Ok(Tried::Again),
            RecordOutcome::Quarantined => Err(Error::OutcomeUnknown),
        }
    }

    async fn look_up(&self, id: OrderId, user: UserId, already: bool) -> Result<Tried, Error> {
        // The order is in the ledger: failing to read it says nothing else.
        match self.ledger.order(id).await.map_err(|_| Error::OutcomeUnknown)? {
            Some(order) if order.user == user && order.status.is_live() => Ok(Tried::Bought(Bought { order, already })),
            _ => Ok(Tried::Again),
        }
    }

    /// Hands an admitted order to the sale's batch.
    fn submit(
        &self,
        sale: SaleId,
        user: UserId,
        order: OrderId,
        pass: Decision,
    ) -> Result<Ticket<CommitOutcome>, Error> {
        let admitted = Admitted { order, user, seq: pass.seq, at: pass.at };
        let pending = Pending { epoch: pass.epoch, admitted };
        self.with_committer(sale, |committer| committer.batch.submit(pending))?.map_err(Error::from)
    }

    /// Does something at the sale's committer, which is set up if need be. Busy once closed.
    fn with_committer<T>(&self, sale: SaleId, act: impl FnOnce(&SaleCommitter) -> T) -> Result<T, Error> {
        if let Some(committers) = &*self.committers.read().unwrap_or_else(PoisonError::into_inner)
            && let Some(committer) = committers.get(&sale)
        {
            return Ok(act(committer));
        }
        let mut committers = self.committers.write().unwrap_or_else(PoisonError::into_inner);
        let Some(committers) = &mut *committers else { return Err(Error::Busy) };
        let committer = committers.entry(sale).or_insert_with(|| {
            let after = self.config.quarantine_after;
            let recording = Recording::new(sale, self.ledger.clone(), self.clock.clone(), after);
            let commit = Arc::new(Committer::new(sale, self.ledger.clone(), self.gate.clone(), recording));
            let retrying = commit.clone();
            let retrying = AbortOnDrop::spawn(async move { retrying.retry_suspects().await });
            let SoloConfig { max_batch, queue_per_sale: queue, .. } = self.config;
            let options = Options { max_batch, queue, in_flight: 2, abandoned: Abandoned::Keep };
            let batch = Batcher::new(commit.clone(), options, self.places.clone());
            SaleCommitter { commit, batch, retrying }
        });
        Ok(act(committer))
    }

    /// CatalogueCache the sale anew from the ledger.
    pub async fn refresh(&self, sale: SaleId) {
        // Closed: nothing is sold any more, so nothing needs to be right.
        let Ok(commit) = self.with_committer(sale, |committer| committer.commit.clone()) else { return };
        commit.refresh().await;
    }

    /// Puts the committer of a sale away that is long over.
    pub async fn retire(&self, sale: SaleId) {
        let committer = self
            .committers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .and_then(|committers| committers.remove(&sale));
        if let Some(committer) = committer {
            committer.close().await;
        }
    }

    /// How many orders wait for the ledger or are being recorded, over all sales.
    pub fn waiting(&self) -> usize {
        self.config.queue_total - self.places.available_permits()
    }

    /// Takes no more orders, and returns when everything that was admitted is settled.
    pub async fn close(&self) {
        let committers = self.committers.write().unwrap_or_else(PoisonError::into_inner).take();
        for committer in committers.into_iter().flat_map(HashMap::into_values) {
            committer.close().await;
        }
    }
}
