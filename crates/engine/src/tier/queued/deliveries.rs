//! What the broker has delivered and is not acknowledged: which orders are to be recorded next, and which markers have everything before
//! them recorded. No I/O.
//!
//! Orders are grouped by sale. One group of a sale is recorded at a time; those that could not be recorded wait for growing pauses and are
//! tried apart from new ones, so that they hold up nothing. A marker passes when every earlier delivery of its partition is done. What
//! is before a marker is tried at once and goes into quarantine if the database rejects it: under the next epoch it would be lost.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use stampede_core::SaleId;
use stampede_queue::{Batch, Delivery, Payload, Tag};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A batch that was delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) tag: Tag,
    partition: u16,
    pub(super) batch: Batch,
    /// How long it waits if it cannot be recorded.
    pause: Duration,
    /// When it is tried again.
    due: Instant,
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Record these batches of one sale. `quarantine`: what the database rejects goes into quarantine at once.
    Record { sale: SaleId, batches: Vec<Held>, quarantine: bool },
    /// Report a marker: everything before it is done.
    Marker { tag: Tag, partition: u16, incarnation: u64 },
    /// Store bytes that are not a message as a dead letter.
    DeadLetter { tag: Tag, partition: u16, bytes: Vec<u8>, reason: String },
}

#[derive(Debug)]
enum Item {
    /// Being handled, or waiting.
    Other,
    Marker {
        incarnation: u64,
        is_reported: bool,
    },
}

#[derive(Debug, Default)]
struct OfSale {
    is_busy: bool,
    new: VecDeque<Held>,
    /// Could not be recorded so far.
    again: Vec<Held>,
}

#[derive(Debug, Default)]
pub(super) struct Deliveries {
    /// What is not done, by partition and in the order of delivery.
    partitions: HashMap<u16, BTreeMap<Tag, Item>>,
    sales: HashMap<SaleId, OfSale>,
    /// To be stored as dead letters.
    undecodable: Vec<Work>,
}

impl Deliveries {
    pub(super) fn add(&mut self, delivery: Delivery, now: Instant) {
        let Delivery { tag, partition, payload, .. } = delivery;
        let items = self.partitions.entry(partition).or_default();
        match payload {
            Payload::Batch(batch) => {
                items.insert(tag, Item::Other);
                let held = Held { tag, partition, pause: FIRST_PAUSE, due: now, batch };
                self.sales.entry(held.batch.sale).or_default().new.push_back(held);
            }
            Payload::Marker(marker) => {
                items.insert(tag, Item::Marker { incarnation: marker.incarnation, is_reported: false });
                let before = |held: &&mut Held| held.partition == partition;
                for held in self.sales.values_mut().flat_map(|sale| &mut sale.again).filter(before) {
                    held.due = now;
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
            sale.new.clear();
            sale.again.clear();
            sale.is_busy
        });
    }

    /// Whether a marker waits for this delivery.
    fn is_before_marker(&self, held: &Held) -> bool {
        let items = self.partitions.get(&held.partition);
        items.is_some_and(|items| items.range(held.tag..).any(|(_, item)| matches!(item, Item::Marker { .. })))
    }

    /// What can be done now, with at most `max_orders` orders of a sale (or one batch) at once.
    pub(super) fn take_work(&mut self, now: Instant, max_orders: usize) -> Vec<Work> {
        let mut work = std::mem::take(&mut self.undecodable);
        let mut groups = Vec::new();
        for (&sale, of_sale) in self.sales.iter_mut().filter(|(_, of_sale)| !of_sale.is_busy) {
            let due: Vec<Held> = of_sale.again.extract_if(.., |held| held.due <= now).collect();
            let batches = if due.is_empty() { take_new(&mut of_sale.new, max_orders) } else { due };
            if !batches.is_empty() {
                of_sale.is_busy = true;
                groups.push((sale, batches));
            }
        }
        for (sale, batches) in groups {
            let quarantine = batches.iter().any(|held| self.is_before_marker(held));
            work.push(Work::Record { sale, batches, quarantine });
        }
        for (&partition, items) in &mut self.partitions {
            if let Some((&tag, Item::Marker { incarnation, is_reported })) = items.iter_mut().next()
                && !*is_reported
            {
                *is_reported = true;
                work.push(Work::Marker { tag, partition, incarnation: *incarnation });
            }
        }
        work
    }

    /// Notes what became of batches of a sale. Returns the deliveries to be acknowledged.
    pub(super) fn recorded(&mut self, sale: SaleId, batches: Vec<(Held, bool)>, now: Instant) -> Vec<Tag> {
        let mut done = Vec::new();
        let mut again = Vec::new();
        for (mut held, is_done) in batches {
            if is_done {
                done.extend(self.finished(held.partition, held.tag));
            } else if self.partitions.get(&held.partition).is_some_and(|items| items.contains_key(&held.tag)) {
                held.due = now + if self.is_before_marker(&held) { FIRST_PAUSE } else { held.pause };
                held.pause = (held.pause * 2).min(LONGEST_PAUSE);
                again.push(held);
            }
        }
        if let Some(of_sale) = self.sales.get_mut(&sale) {
            of_sale.is_busy = false;
            of_sale.again.extend(again);
            if of_sale.new.is_empty() && of_sale.again.is_empty() {
                self.sales.remove(&sale);
            }
        }
        done
    }

    /// Notes that a delivery is done. Returns it if it is to be acknowledged: it was not forgotten.
    pub(super) fn finished(&mut self, partition: u16, tag: Tag) -> Option<Tag> {
        self.partitions.get_mut(&partition)?.remove(&tag).map(|_| tag)
    }

    /// When something that could not be recorded is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let idle = self.sales.values().filter(|sale| !sale.is_busy);
        idle.flat_map(|sale| &sale.again).map(|held| held.due).min()
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
