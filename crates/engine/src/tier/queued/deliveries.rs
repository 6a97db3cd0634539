//! What the broker has delivered and is not acknowledged: which orders are to be recorded next, and which markers have everything before
//! them recorded. No I/O.
//!
//! Orders are grouped by sale. One group of a sale is recorded at a time; those that could not be recorded wait for growing pauses and are
//! tried apart from new ones, so that they hold up nothing. A marker passes when every earlier delivery of its partition is done. What
//! is before the marker of a rebuild is tried at once and goes into quarantine if the database rejects it: under the next epoch it would be
//! lost. If every order of a batch is rejected, it is parked instead.
//!
//! A sale is stuck if a group of it is being recorded for a while, or something could not be recorded for a while. If the ledger answers
//! meanwhile, it is not an outage: what was delivered of such a sale is parked ([`super::parked`]), and so is what comes later, so that it
//! does not take the places of other sales.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_core::SaleId;
use stampede_queue::{Batch, Delivery, Marker, Payload, Tag};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A sale of which nothing can be recorded for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(3);
/// The ledger must have answered for this long before anything is parked: recording tries again every second after an outage.
const ANSWERING_FOR: Duration = Duration::from_secs(2);
/// The pause after the ledger has not answered, or has parked nothing.
const PROBE_PAUSE: Duration = Duration::from_secs(1);

/// A batch that was delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) tag: Tag,
    partition: u16,
    pub(super) batch: Arc<Batch>,
    /// How long it waits if it cannot be recorded.
    pause: Duration,
    /// When it is tried again.
    due: Instant,
    /// When it could not be recorded for the first time.
    failed_at: Option<Instant>,
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Record these batches of one sale. `quarantine`: what the database rejects goes into quarantine at once, unless every order fails.
    Record { sale: SaleId, batches: Vec<Held>, quarantine: bool },
    /// Report a marker: everything before it is done.
    Marker { tag: Tag, partition: u16, marker: Marker },
    /// Store bytes that are not a message as a dead letter.
    DeadLetter { tag: Tag, partition: u16, bytes: Vec<u8>, reason: String },
    /// Ask the ledger anything, to know whether it answers.
    Probe,
    /// Keep these deliveries of a sale in the ledger.
    Park { sale: SaleId, held: Vec<Held> },
}

#[derive(Debug)]
enum Item {
    /// Being handled, or waiting.
    Other,
    Marker {
        marker: Marker,
        is_reported: bool,
    },
}

#[derive(Debug, Default)]
struct OfSale {
    /// Since when a group is being recorded.
    busy_since: Option<Instant>,
    /// The deliveries of that group.
    recording: Vec<Held>,
    new: VecDeque<Held>,
    /// Could not be recorded so far.
    again: Vec<Held>,
    is_parking: bool,
}

impl OfSale {
    const fn is_busy(&self) -> bool {
        self.busy_since.is_some()
    }

    fn is_empty(&self) -> bool {
        self.recording.is_empty() && self.new.is_empty() && self.again.is_empty()
    }

    /// When something is to be parked if nothing happens.
    fn park_at(&self) -> Option<Instant> {
        let waiting = self.busy_since.filter(|_| !self.recording.is_empty() || !self.new.is_empty());
        let failed = self.recording.iter().chain(&self.again).filter_map(|held| held.failed_at).min();
        waiting.into_iter().chain(failed).min().map(|since| since + STUCK_AFTER)
    }

    fn is_stuck(&self, now: Instant) -> bool {
        let busy = self.busy_since.map(|since| since + STUCK_AFTER);
        busy.into_iter().chain(self.park_at()).any(|at| at <= now)
    }

    /// What is to be parked.
    fn stuck(&self, now: Instant) -> Vec<Held> {
        let is_over = |since: Instant| since + STUCK_AFTER <= now;
        let has_failed = |held: &&Held| held.failed_at.is_some_and(is_over);
        let is_stuck = self.busy_since.is_some_and(is_over);
        let recording = self.recording.iter().filter(|held| is_stuck || has_failed(held));
        let new = self.new.iter().filter(|_| is_stuck);
        recording.chain(new).chain(self.again.iter().filter(has_failed)).cloned().collect()
    }
}

/// Whether the ledger answers, asked only while a sale is stuck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LedgerState {
    Unknown { ask_at: Option<Instant> },
    Asked,
    AnswersSince(Instant),
}

impl Default for LedgerState {
    fn default() -> Self {
        Self::Unknown { ask_at: None }
    }
}

#[derive(Debug, Default)]
pub(super) struct Deliveries {
    /// What is not done, by partition and in the order of delivery.
    partitions: HashMap<u16, BTreeMap<Tag, Item>>,
    sales: HashMap<SaleId, OfSale>,
    /// To be stored as dead letters.
    undecodable: Vec<Work>,
    ledger: LedgerState,
}

impl Deliveries {
    pub(super) fn add(&mut self, delivery: Delivery, now: Instant) {
        let Delivery { tag, partition, payload, .. } = delivery;
        let items = self.partitions.entry(partition).or_default();
        match payload {
            Payload::Batch(batch) => {
                items.insert(tag, Item::Other);
                let batch = Arc::new(batch);
                let held = Held { tag, partition, pause: FIRST_PAUSE, due: now, batch, failed_at: None };
                self.sales.entry(held.batch.sale).or_default().new.push_back(held);
            }
            Payload::Marker(marker) => {
                items.insert(tag, Item::Marker { marker, is_reported: false });
                if matches!(marker, Marker::Rebuild { .. }) {
                    let before = |held: &&mut Held| held.partition == partition;
                    for held in self.sales.values_mut().flat_map(|sale| &mut sale.again).filter(before) {
                        held.due = now;
                    }
                }
            }
            Payload::Undecodable { bytes, error } => {
                items.insert(tag, Item::Other);
                self.undecodable.push(Work::DeadLetter { tag, partition, bytes, reason: error.to_string() });
            }
        }
    }

    /// Forgets everything: the connection was lost, so that all of it is delivered again. Sales whose orders are being recorded stay
    /// busy until that is done.
    pub(super) fn forget(&mut self) {
        self.partitions.clear();
        self.undecodable.clear();
        self.sales.retain(|_, sale| {
            sale.recording.clear();
            sale.new.clear();
            sale.again.clear();
            sale.is_busy()
        });
    }

    /// Whether a rebuild waits for this delivery.
    fn is_before_rebuild(&self, held: &Held) -> bool {
        let is_rebuild = |item: &Item| matches!(item, Item::Marker { marker: Marker::Rebuild { .. }, .. });
        let items = self.partitions.get(&held.partition);
        items.is_some_and(|items| items.range(held.tag..).any(|(_, item)| is_rebuild(item)))
    }

    /// What can be done now, with at most `max_orders` orders of a sale (or one batch) at once.
    pub(super) fn take_work(&mut self, now: Instant, max_orders: usize) -> Vec<Work> {
        let mut work = std::mem::take(&mut self.undecodable);
        let mut groups = Vec::new();
        for (&sale, of_sale) in self.sales.iter_mut().filter(|(_, of_sale)| !of_sale.is_busy()) {
            let due: Vec<Held> = of_sale.again.extract_if(.., |held| held.due <= now).collect();
            let batches = if due.is_empty() { take_new(&mut of_sale.new, max_orders) } else { due };
            if !batches.is_empty() {
                of_sale.busy_since = Some(now);
                of_sale.recording.clone_from(&batches);
                groups.push((sale, batches));
            }
        }
        for (sale, batches) in groups {
            let quarantine = batches.iter().any(|held| self.is_before_rebuild(held));
            work.push(Work::Record { sale, batches, quarantine });
        }
        for (&partition, items) in &mut self.partitions {
            if let Some((&tag, Item::Marker { marker, is_reported })) = items.iter_mut().next()
                && !*is_reported
            {
                *is_reported = true;
                work.push(Work::Marker { tag, partition, marker: *marker });
            }
        }
        self.take_parking(now, &mut work);
        work
    }

    /// Parks what is stuck, if the ledger has answered for a while.
    fn take_parking(&mut self, now: Instant, work: &mut Vec<Work>) {
        if !self.sales.values().any(|sale| sale.is_stuck(now)) {
            if self.ledger != LedgerState::Asked {
                self.ledger = LedgerState::default();
            }
            return;
        }
        match self.ledger {
            LedgerState::Unknown { ask_at } if ask_at.is_none_or(|at| at <= now) => {
                self.ledger = LedgerState::Asked;
                work.push(Work::Probe);
            }
            LedgerState::AnswersSince(since) if since + ANSWERING_FOR <= now => {
                for (&sale, of_sale) in self.sales.iter_mut().filter(|(_, of_sale)| !of_sale.is_parking) {
                    let held = of_sale.stuck(now);
                    if !held.is_empty() {
                        of_sale.is_parking = true;
                        work.push(Work::Park { sale, held });
                    }
                }
            }
            LedgerState::Unknown { .. } | LedgerState::Asked | LedgerState::AnswersSince(_) => {}
        }
    }

    /// Notes whether the ledger has answered a [`Work::Probe`].
    pub(super) fn probed(&mut self, is_answered: bool, now: Instant) {
        self.ledger = if is_answered { LedgerState::AnswersSince(now) } else { Self::ask_later(now) };
    }

    fn ask_later(now: Instant) -> LedgerState {
        LedgerState::Unknown { ask_at: Some(now + PROBE_PAUSE) }
    }

    /// Notes whether deliveries of a sale were parked. Returns those to be acknowledged.
    pub(super) fn parked(&mut self, sale: SaleId, held: &[Held], is_stored: bool, now: Instant) -> Vec<Tag> {
        let tags: HashSet<Tag> = if is_stored { held.iter().map(|held| held.tag).collect() } else { HashSet::new() };
        if !is_stored {
            self.ledger = Self::ask_later(now);
        }
        if let Some(of_sale) = self.sales.get_mut(&sale) {
            of_sale.is_parking = false;
            let is_left = |held: &Held| !tags.contains(&held.tag);
            of_sale.recording.retain(is_left);
            of_sale.new.retain(is_left);
            of_sale.again.retain(is_left);
            if of_sale.is_empty() && !of_sale.is_busy() {
                self.sales.remove(&sale);
            }
        }
        let stored = held.iter().filter(|_| is_stored);
        stored.filter_map(|held| self.finished(held.partition, held.tag)).collect()
    }

    /// Notes what became of batches of a sale. Returns the deliveries to be acknowledged.
    pub(super) fn recorded(&mut self, sale: SaleId, batches: Vec<(Held, bool)>, now: Instant) -> Vec<Tag> {
        let mut done = Vec::new();
        let mut again = Vec::new();
        for (mut held, is_done) in batches {
            if is_done {
                done.extend(self.finished(held.partition, held.tag));
            } else if self.partitions.get(&held.partition).is_some_and(|items| items.contains_key(&held.tag)) {
                held.due = now + if self.is_before_rebuild(&held) { FIRST_PAUSE } else { held.pause };
                held.pause = (held.pause * 2).min(LONGEST_PAUSE);
                held.failed_at.get_or_insert(now);
                again.push(held);
            }
        }
        if let Some(of_sale) = self.sales.get_mut(&sale) {
            of_sale.busy_since = None;
            of_sale.recording.clear();
            of_sale.again.extend(again);
            if of_sale.is_empty() {
                self.sales.remove(&sale);
            }
        }
        done
    }

    /// Notes that a delivery is done. Returns it if it is to be acknowledged: it was not forgotten.
    pub(super) fn finished(&mut self, partition: u16, tag: Tag) -> Option<Tag> {
        self.partitions.get_mut(&partition)?.remove(&tag).map(|_| tag)
    }

    /// When something is due that no delivery and no task brings about.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let idle = self.sales.values().filter(|sale| !sale.is_busy());
        let again = idle.flat_map(|sale| &sale.again).map(|held| held.due).min();
        let waiting = self.sales.values().filter(|sale| !sale.is_parking);
        let parking = waiting.filter_map(OfSale::park_at).min().and_then(|park_at| match self.ledger {
            LedgerState::Asked => None,
            LedgerState::Unknown { ask_at } => Some(park_at.max(ask_at.unwrap_or(now))),
            LedgerState::AnswersSince(since) => Some(park_at.max(since + ANSWERING_FOR)),
        });
        again.into_iter().chain(parking).min()
    }
}

/// The first batches, with at most `max_orders` orders together.
fn take_new(new: &mut VecDeque<Held>, max_orders: usize) -> Vec<Held> {
    let mut orders = 0;
    let fits = |held: &&Held| {
        orders += held.batch.orders.len();
        orders <= max_orders
    };
    let count = new.iter().take_while(fits).count().max(1).min(new.len());
    new.drain(..count).collect()
}

#[cfg(test)]
mod tests;
