//! The tier `shielded`: as [`queued`](super::queued), with a shield on each node that refuses without asking the gate, so that the part of
//! a crowd that comes too late or too early costs Redis and the database nothing.
//!
//! - [`refusal`]: what can be concluded from an answer of the gate: sold out, not started or ended
//! - [`state`]: what a node knows about one sale, and when that suffices to refuse
//! - [`buyers`]: who has an order, within a bound over all sales
//! - [`Shield`]: all sales of a node; asks the gate for what it needs
//!
//! The shield is never in the way of an owner: a user who may have an order goes to the gate. A refusal that is no longer right lasts at
//! most for the expiry, whatever happens to messages, and only as long as a message takes while they arrive.

mod buyers;
mod refusal;
mod state;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, counter, gauge};
use parking_lot::{Mutex, RwLock};
use stampede_core::ports::GateError;
use stampede_core::{Refusal, SaleId, UserId};
use stampede_gate::RedisGate;
use stampede_gate::redis::Availability;
use tokio::sync::OwnedSemaphorePermit;

use self::buyers::{Buyers, Capacity};
pub(super) use self::state::Generation;
use self::state::{Pauses, SaleState};

/// The most sales with a shield. Requests for others go to the gate.
const MAX_SALES: usize = 10_000;
/// The shortest time between two readings of a sale's buyers. It is longer if they take long.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two searches for sales that have left the gate.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two questions about a sale, or a fifth of the expiry if that is shorter.
const QUESTION_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy)]
pub struct ShieldConfig {
    /// How long an answer of the gate is used.
    pub expiry: Duration,
    /// How many buyers are remembered, over all sales.
    pub max_buyers: u32,
}

impl ShieldConfig {
    fn pauses(self) -> Pauses {
        let renewal = self.expiry / 5;
        Pauses { renewal, question: QUESTION_INTERVAL.min(renewal), reading: READ_INTERVAL }
    }
}

/// What one node knows about sales for which the gate refuses users without an order.
#[derive(Debug)]
pub(super) struct Shield {
    config: ShieldConfig,
    gate: Arc<RedisGate>,
    sales: RwLock<HashMap<SaleId, Arc<Mutex<SaleState>>>>,
    /// When sales that have left the gate were last searched for.
    searched_at: Mutex<Option<Instant>>,
    /// When messages have last begun to arrive. `None` while they do not: they may be missed.
    subscribed_at: Mutex<Option<Instant>>,
    refused: Counter,
    probes: Counter,
    reads: Counter,
    /// How often the buyers of a sale did not fit.
    over_capacity: Counter,
    capacity: Capacity,
}

impl Shield {
    pub(super) fn new(config: ShieldConfig, gate: Arc<RedisGate>) -> Arc<Self> {
        let shield = Self {
            config,
            gate,
            sales: RwLock::default(),
            searched_at: Mutex::new(None),
            subscribed_at: Mutex::new(None),
            refused: counter!("stampede_shield_refused_total"),
            probes: counter!("stampede_shield_probes_total"),
            reads: counter!("stampede_shield_buyer_reads_total"),
            over_capacity: counter!("stampede_shield_over_capacity_total"),
            capacity: Capacity::new(config.max_buyers),
        };
        for shown_from_the_start in [&shield.refused, &shield.probes, &shield.reads, &shield.over_capacity] {
            shown_from_the_start.increment(0);
        }
        Arc::new(shield)
    }

    /// Why this node may refuse the user.
    pub(super) fn refusal(self: &Arc<Self>, sale: SaleId, user: UserId) -> Option<Refusal> {
        let state = self.sales.read().get(&sale).cloned()?;
        let now = Instant::now();
        let (refusal, is_renewal_due) = {
            let mut state = state.lock();
            (state.refusal(user, now), state.begin_renewal(now, self.config.pauses()))
        };
        if is_renewal_due {
            let shield = self.clone();
            tokio::spawn(async move { shield.renew(sale, &state).await });
        }
        refusal
    }

    /// This node has refused a request by itself.
    pub(super) fn count_refusal(&self) {
        self.refused.increment(1);
    }

    /// A message, or an answer of the gate, has named this generation of the sale.
    pub(super) fn note(&self, sale: SaleId, generation: Generation) {
        if let Some(state) = self.state(sale) {
            state.lock().note(generation);
        }
    }

    /// A message says that the sale was sold out. Only an answer of the gate counts, so it is asked.
    pub(super) fn sold_out_elsewhere(self: &Arc<Self>, sale: SaleId, generation: Generation) {
        self.note(sale, generation);
        self.read_buyers(sale);
    }

    /// The gate has refused a user for this reason. It does not say for how long that holds, so it is asked for that.
    pub(super) fn refused(self: &Arc<Self>, sale: SaleId, generation: Generation, refusal: Refusal) {
        let Some(state) = self.state(sale) else { return };
        let (has_buyers, asks) = {
            let mut known = state.lock();
            known.note(generation);
            let has_buyers = known.has_buyers_of(generation, refusal);
            (has_buyers, has_buyers && known.begin_asking(Instant::now(), self.config.pauses()))
        };
        if !has_buyers {
            self.read_buyers(sale);
        } else if asks {
            let shield = self.clone();
            tokio::spawn(async move { shield.renew(sale, &state).await });
        }
    }

    /// Messages arrive from now on. What was known before may be out of date.
    pub(super) fn subscribed(&self) {
        *self.subscribed_at.lock() = Some(Instant::now());
        self.sales.read().values().for_each(|state| state.lock().clear());
    }

    /// Messages may be missed from now on.
    pub(super) fn disconnected(&self) {
        *self.subscribed_at.lock() = None;
    }

    /// Whether the answer to a call that began at this time may be used: a message about a change since then would have arrived. While
    /// messages do not arrive, the expiry alone limits how long an answer is used.
    fn counts(&self, asked_at: Instant) -> bool {
        self.subscribed_at.lock().is_none_or(|subscribed_at| asked_at >= subscribed_at)
    }

    /// The state of a sale; `None` if there are too many.
    fn state(&self, sale: SaleId) -> Option<Arc<Mutex<SaleState>>> {
        {
            let sales = self.sales.read();
            if let Some(state) = sales.get(&sale) {
                return Some(state.clone());
            }
            if sales.len() >= MAX_SALES && !self.begin_search() {
                return None;
            }
        }
        let mut sales = self.sales.write();
        if sales.len() >= MAX_SALES && !sales.contains_key(&sale) {
            // Sales that have left the gate make room.
            sales.retain(|&known, _| self.gate.opened_as(known).is_some());
            if sales.len() >= MAX_SALES {
                return None;
            }
        }
        let state = sales.entry(sale).or_default().clone();
        gauge!("stampede_shield_sales").set(u32::try_from(sales.len()).unwrap_or(u32::MAX));
        Some(state)
    }

    /// Whether sales that have left the gate should be searched for now: a search looks at all of them, while no request is refused.
    fn begin_search(&self) -> bool {
        let (mut searched_at, now) = (self.searched_at.lock(), Instant::now());
        let is_due = searched_at.is_none_or(|at| now.duration_since(at) >= SEARCH_INTERVAL);
        if is_due {
            *searched_at = Some(now);
        }
        is_due
    }

    /// Asks the gate once more, shortly before its last answer expires, so that a crowd does not reach it at the moment of expiry.
    async fn renew(&self, sale: SaleId, state: &Mutex<SaleState>) {
        if let Err(error) = self.ask(sale, state).await {
            tracing::debug!(%sale, %error, "cannot ask whether a sale is available; its requests go to the gate");
        }
        state.lock().end_asking();
    }

    /// Asks whether the sale is available, and remembers why users without an order are refused.
    async fn ask(
        &self,
        sale: SaleId,
        state: &Mutex<SaleState>,
    ) -> Result<Option<(Generation, Refusal, Availability)>, GateError> {
        self.probes.increment(1);
        let asked_at = Instant::now();
        let Some(answer) = self.gate.availability(sale).await? else { return Ok(None) };
        let generation = Generation { epoch: answer.epoch, number: answer.generation };
        let mut state = state.lock();
        state.note(generation);
        let Some((refusal, left)) = refusal::of(&answer) else { return Ok(None) };
        state.note_marks(generation, refusal, answer.marks);
        if self.counts(asked_at) {
            // Redis reads its clock after the call began, so counting from there is too short rather than too long.
            state.set_refusing(generation, refusal, asked_at + self.config.expiry.min(left));
        }
        Ok(Some((generation, refusal, answer)))
    }

    /// Reads who has an order, in a task, at most once at a time and once a second, and for at most about a tenth of the time.
    fn read_buyers(self: &Arc<Self>, sale: SaleId) {
        let Some(state) = self.state(sale) else { return };
        let Some(pause) = state.lock().begin_reading(Instant::now(), self.config.pauses()) else { return };
        let shield = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            if let Err(error) = shield.read_buyers_now(sale, &state).await {
                tracing::debug!(%sale, %error, "cannot read the buyers of a sale; its requests go to the gate");
            }
            state.lock().end_reading();
        });
    }

    async fn read_buyers_now(&self, sale: SaleId, state: &Mutex<SaleState>) -> Result<(), GateError> {
        // Why users are refused is asked first: a mark that is set later belongs to a later generation, or to a time in which they are no
        // longer refused for this reason.
        let Some((generation, refusal, answer)) = self.ask(sale, state).await? else { return Ok(()) };
        if state.lock().has_buyers_of(generation, refusal) {
            return Ok(());
        }
        let Some(reserved) = self.reserve(state, answer.marks) else {
            self.over_capacity.increment(1);
            tracing::debug!(%sale, marks = answer.marks, "too many buyers to remember; requests for the sale go to the gate");
            return Ok(());
        };
        let mut buyers = Buyers::with_capacity(reserved);
        if answer.marks > 0 {
            let began_at = Instant::now();
            let read = self.read_pages(sale, &mut buyers).await;
            state.lock().note_reading(Instant::now(), began_at.elapsed());
            read?;
        }
        let mut state = state.lock();
        if answer.marks > 0 {
            // Under the lock: once a reading is counted, the node refuses by what it has read.
            self.reads.increment(1);
        }
        state.set_buyers(generation, refusal, answer.marks, buyers);
        Ok(())
    }

    async fn read_pages(&self, sale: SaleId, buyers: &mut Buyers) -> Result<(), GateError> {
        let mut cursor = 0;
        loop {
            let (next, page) = self.gate.buyers(sale, cursor).await?;
            buyers.extend(page);
            if next == 0 {
                return Ok(());
            }
            cursor = next;
        }
    }

    /// Room for the buyers of a sale. If there is none, sales that were not asked for lately make room; `None` if that is not enough.
    fn reserve(&self, state: &Mutex<SaleState>, count: u32) -> Option<OwnedSemaphorePermit> {
        let now = Instant::now();
        state.lock().forget_unused_buyers(now);
        let reserved = self.capacity.reserve(count).or_else(|| {
            self.sales.read().values().for_each(|state| state.lock().forget_unused_buyers(now));
            self.capacity.reserve(count)
        });
        gauge!("stampede_shield_buyers").set(self.capacity.used());
        reserved
    }
}
