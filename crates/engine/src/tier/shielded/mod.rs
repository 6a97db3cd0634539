//! The tier `shielded`: as [`queued`](super::queued), with a shield on each node that answers `sold_out` without asking the gate, so that the
//! part of a crowd that comes too late costs Redis and the database nothing.
//!
//! - [`state`]: what a node knows about one sale, and when that suffices to refuse
//! - [`Shield`]: all sales of a node; asks the gate for what it needs
//!
//! The shield is never in the way of an owner: a user who may have an order goes to the gate. A refusal that is no longer right lasts at
//! most for the expiry, whatever happens to messages, and only as long as a message takes while they arrive.

mod state;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, counter, gauge};
use parking_lot::{Mutex, RwLock};
use stampede_core::ports::GateError;
use stampede_core::{SaleId, UserId};
use stampede_gate::RedisGate;
use stampede_gate::redis::Fullness;

pub(super) use self::state::Generation;
use self::state::{Buyers, SaleState};

/// The most sales with a shield. Requests for others go to the gate.
const MAX_SALES: usize = 10_000;
/// The shortest time between two readings of a sale's buyers.
const READ_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
pub struct ShieldConfig {
    /// How long an answer of the gate that a sale is sold out is used.
    pub expiry: Duration,
}

/// What one node knows about sales that are sold out.
#[derive(Debug)]
pub(super) struct Shield {
    config: ShieldConfig,
    gate: Arc<RedisGate>,
    sales: RwLock<HashMap<SaleId, Arc<Mutex<SaleState>>>>,
    /// When messages have last begun to arrive. `None` while they do not: they may be missed.
    subscribed_at: Mutex<Option<Instant>>,
    refused: Counter,
    probes: Counter,
    reads: Counter,
}

impl Shield {
    pub(super) fn new(config: ShieldConfig, gate: Arc<RedisGate>) -> Arc<Self> {
        let shield = Self {
            config,
            gate,
            sales: RwLock::default(),
            subscribed_at: Mutex::new(None),
            refused: counter!("stampede_shield_refused_total"),
            probes: counter!("stampede_shield_probes_total"),
            reads: counter!("stampede_shield_buyer_reads_total"),
        };
        for shown_from_the_start in [&shield.refused, &shield.probes, &shield.reads] {
            shown_from_the_start.increment(0);
        }
        Arc::new(shield)
    }

    /// Whether this node may refuse the user with `sold_out`.
    pub(super) fn is_sold_out(self: &Arc<Self>, sale: SaleId, user: UserId) -> bool {
        let Some(state) = self.sales.read().get(&sale).cloned() else { return false };
        let now = Instant::now();
        let (is_sold_out, is_renewal_due) = {
            let mut state = state.lock();
            (state.is_sold_out(user, now), state.begin_renewal(now, self.config.expiry))
        };
        if is_renewal_due {
            let shield = self.clone();
            tokio::spawn(async move { shield.renew(sale, &state).await });
        }
        if is_sold_out {
            self.refused.increment(1);
        }
        is_sold_out
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

    /// The gate has refused a buyer because nothing is left. It does not say for how long the sale is on, so it is asked for that.
    pub(super) fn answered_sold_out(self: &Arc<Self>, sale: SaleId, generation: Generation) {
        let Some(state) = self.state(sale) else { return };
        let (has_buyers, asks) = {
            let mut known = state.lock();
            known.note(generation);
            let has_buyers = known.has_buyers_of(generation);
            (has_buyers, has_buyers && known.begin_asking(Instant::now()))
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
        if let Some(state) = self.sales.read().get(&sale) {
            return Some(state.clone());
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

    /// Asks the gate once more, shortly before its last answer expires, so that a crowd does not reach it at the moment of expiry.
    async fn renew(&self, sale: SaleId, state: &Mutex<SaleState>) {
        let _fullness = self.ask(sale, state).await;
        state.lock().end_renewal();
    }

    /// Asks whether the sale is sold out.
    async fn ask(&self, sale: SaleId, state: &Mutex<SaleState>) -> Result<Option<Fullness>, GateError> {
        self.probes.increment(1);
        let asked_at = Instant::now();
        let Some(fullness) = self.gate.fullness(sale).await? else { return Ok(None) };
        let generation = Generation { epoch: fullness.epoch, number: fullness.generation };
        let mut state = state.lock();
        state.note(generation);
        if let Some(left) = fullness.sold_out_for
            && self.counts(asked_at)
        {
            state.set_sold_out(generation, asked_at + self.config.expiry.min(left));
        }
        Ok(Some(fullness))
    }

    /// Reads who has an order, in a task, at most once at a time and once a second.
    fn read_buyers(self: &Arc<Self>, sale: SaleId) {
        let Some(state) = self.state(sale) else { return };
        let Some(pause) = state.lock().begin_reading(Instant::now(), READ_INTERVAL) else { return };
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
        // Whether it is sold out is asked first: a mark that is set later belongs to a later generation, because one must have been
        // released before.
        let Some(fullness) = self.ask(sale, state).await?.filter(|fullness| fullness.sold_out_for.is_some()) else {
            return Ok(());
        };
        self.reads.increment(1);
        let mut buyers = Buyers::with_capacity(fullness.marks as usize);
        let mut cursor = 0;
        loop {
            let (next, page) = self.gate.buyers(sale, cursor).await?;
            buyers.extend(page);
            if next == 0 {
                break;
            }
            cursor = next;
        }
        let generation = Generation { epoch: fullness.epoch, number: fullness.generation };
        state.lock().set_buyers(generation, buyers);
        Ok(())
    }
}
