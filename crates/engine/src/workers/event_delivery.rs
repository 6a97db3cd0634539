//! Sends the steps of orders to a receiver of the operator, from the outbox in the ledger.
//!
//! Entries are read by rising id, and deleted once their events were accepted. An event of an order is sent only after those before it were
//! accepted, or with them in one message, in sequence. While the receiver is away, everything waits. A message that it rejects is halved
//! until the event is known: that one is tried again a few times and then set aside, with the later ones of its order, and the others go on.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, counter, gauge};
use stampede_core::ports::{
    EventDelivery, HeldEvent, Ledger, LedgerError, OutboxEntry, OutgoingEvent, RejectedEvent, WaitingStep,
};
use stampede_core::{Clock, OrderId, Timestamp};
use stampede_redis::Backoff;

use crate::alerts::{AlertKind, Alerts};
use crate::error::describe;
use crate::events::{EventConfig, EventError};
use crate::scheduled::Schedule;

/// How often the ledger is asked what is due.
const INTERVAL: Duration = Duration::from_millis(500);
/// Entries that are read at once.
const MAX_ENTRIES: u32 = 200;
/// Events in a message.
const MAX_EVENTS: usize = 200;
/// How long the receiver may take to accept a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// How often an event is rejected before it is set aside.
const MAX_TRIES: u32 = 10;
/// After so many rejected events, what is known is written into the ledger before further ones are sent.
const MAX_REJECTED: usize = 20;
/// How long an event waits at least for an earlier one of its order that is not read with it.
const HOLD: Duration = Duration::from_secs(1);
/// How often the entries are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(5);

pub(crate) struct EventWorker {
    pub ledger: Arc<dyn Ledger>,
    pub clock: Arc<dyn Clock>,
    pub config: EventConfig,
    pub alerts: Arc<Alerts>,
    pub schedule: Schedule,
}

/// An event that can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    /// Where in the page its entry is.
    index: usize,
    event: OutgoingEvent,
}

/// The place of an event in the page.
type Place = (usize, OrderId);

/// What the receiver has answered.
#[derive(Debug, Default)]
struct Answers {
    accepted: HashSet<Place>,
    rejected: HashMap<Place, String>,
    /// Why the receiver cannot be used: nothing more was sent.
    unavailable: Option<String>,
}

/// What came of one page of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Round {
    accepted: usize,
    rejected: usize,
    is_unavailable: bool,
}

/// The events of these entries in the order in which they are sent: those of one order in sequence. And those that wait for an earlier one
/// of their order, which is not in these entries because it was rejected.
fn plan(entries: &[OutboxEntry], waiting: &[WaitingStep], until: Timestamp) -> (Vec<Item>, Vec<HeldEvent>) {
    let ids: HashSet<i64> = entries.iter().map(|entry| entry.id).collect();
    // The earliest event of each order that is elsewhere.
    let mut elsewhere: HashMap<OrderId, WaitingStep> = HashMap::new();
    for step in waiting.iter().filter(|step| !ids.contains(&step.entry)) {
        let first = elsewhere.entry(step.order).or_insert(*step);
        if step.to.number() < first.to.number() {
            *first = *step;
        }
    }
    let (mut items, mut held) = (Vec::new(), Vec::new());
    for (index, entry) in entries.iter().enumerate() {
        for event in &entry.events {
            let earlier = elsewhere.get(&event.order).filter(|earlier| earlier.to.number() < event.number());
            match earlier {
                Some(earlier) => held.push(HeldEvent { entry: entry.id, earlier: earlier.entry, until }),
                None => items.push(Item { index, event: *event }),
            }
        }
    }
    // The sort is stable: events of different orders stay in the order of their entries.
    items.sort_by_key(|item| item.event.number());
    (items, held)
}

impl EventWorker {
    /// Any number of nodes may do this at once: the lock of `schedule` only avoids that they send the same events.
    pub(crate) async fn run(self) {
        // Counted beside the delivery, which may wait for the receiver for long.
        tokio::join!(self.deliver(), self.count());
    }

    async fn deliver(&self) {
        let sent = counter!("stampede_events_sent_total");
        sent.increment(0);
        let mut backoff = Backoff::new(self.config.retry_pause, MAX_PAUSE);
        loop {
            match self.deliver_due(&sent).await {
                Ok(None) => tokio::time::sleep(INTERVAL).await,
                Ok(Some(Round { accepted, rejected, is_unavailable })) => {
                    if accepted > 0 || !is_unavailable {
                        backoff.reset();
                    }
                    if is_unavailable {
                        backoff.sleep().await;
                    } else if accepted == 0 && rejected > 0 {
                        // Perhaps the receiver rejects everything. The pause does not grow, because others may wait behind these.
                        tokio::time::sleep(self.config.retry_pause).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        error = describe(&error),
                        "cannot read or update the outbox of events; trying again"
                    );
                    tokio::time::sleep(INTERVAL).await;
                }
            }
        }
    }

    async fn count(&self) {
        let waiting = gauge!("stampede_events_waiting");
        loop {
            match self.ledger.count_events().await {
                Ok(entries) => waiting.set(u32::try_from(entries).unwrap_or(u32::MAX)),
                Err(error) => tracing::warn!(error = describe(&error), "cannot count the events that wait"),
            }
            tokio::time::sleep(COUNT_INTERVAL).await;
        }
    }

    /// Sends what is due, one page of it. `None` if nothing is, or another node does it.
    async fn deliver_due(&self, sent: &Counter) -> Result<Option<Round>, LedgerError> {
        if self.ledger.due_events(self.clock.now(), 1).await?.is_empty() {
            return Ok(None);
        }
        let now = super::earlier_now(self.clock.as_ref(), self.ledger.as_ref()).await?;
        if self.ledger.due_events(now, 1).await?.is_empty() {
            return Ok(None);
        }
        let Some(permit) = self.schedule.begin().await else { return Ok(None) };
        let round = self.deliver_page(now, sent).await;
        permit.end().await;
        round.map(Some)
    }

    async fn deliver_page(&self, now: Timestamp, sent: &Counter) -> Result<Round, LedgerError> {
        let entries = self.ledger.due_events(now, MAX_ENTRIES).await?;
        // What was recorded in a batch is the first event of its order.
        let steps = entries.iter().filter(|entry| !entry.is_batch).flat_map(|entry| &entry.events);
        let orders: Vec<OrderId> = steps.map(|event| event.order).collect();
        let waiting = self.ledger.waiting_steps(&orders).await?;
        let (items, held) = plan(&entries, &waiting, now.plus(HOLD));
        let answers = self.send_all(&items, sent).await;
        let delivery = EventDelivery { held, ..self.results(&entries, &answers, now) };
        self.ledger.finish_events(&delivery).await?;
        for rejected in delivery.rejected.iter().filter(|rejected| rejected.next_at.is_none()) {
            self.report(rejected).await;
        }
        if let Some(error) = &answers.unavailable {
            tracing::warn!(error, "events cannot be delivered; trying again");
        }
        Ok(Round {
            accepted: answers.accepted.len(),
            rejected: answers.rejected.len(),
            is_unavailable: answers.unavailable.is_some(),
        })
    }

    /// Sends these events in messages, one after another.
    async fn send_all(&self, items: &[Item], sent: &Counter) -> Answers {
        let mut answers = Answers::default();
        // The orders with a rejected event.
        let mut stopped: HashSet<OrderId> = HashSet::new();
        // The next message is the last.
        let mut messages: Vec<Vec<Item>> = items.chunks(MAX_EVENTS).rev().map(<[Item]>::to_vec).collect();
        while let Some(mut message) = messages.pop() {
            message.retain(|item| !stopped.contains(&item.event.order));
            if message.is_empty() {
                continue;
            }
            let events: Vec<OutgoingEvent> = message.iter().map(|item| item.event).collect();
            match self.send(&events).await {
                Ok(()) => {
                    sent.increment(events.len() as u64);
                    answers.accepted.extend(message.iter().map(|item| (item.index, item.event.order)));
                }
                Err(error @ EventError::Unavailable(_)) => {
                    answers.unavailable = Some(describe(&error));
                    break;
                }
                Err(error @ EventError::Rejected(_)) => {
                    if let [Item { index, event }] = message[..] {
                        stopped.insert(event.order);
                        answers.rejected.insert((index, event.order), describe(&error));
                        if answers.rejected.len() >= MAX_REJECTED {
                            break;
                        }
                    } else {
                        let later = message.split_off(message.len() / 2);
                        messages.extend([later, message]);
                    }
                }
            }
        }
        answers
    }

    async fn send(&self, events: &[OutgoingEvent]) -> Result<(), EventError> {
        let sending = self.config.sender.send(events);
        let in_time = tokio::time::timeout(SEND_TIMEOUT, sending).await;
        in_time.unwrap_or_else(|_| Err(EventError::Unavailable("it did not answer in time".into())))
    }

    /// What becomes of the entries.
    fn results(&self, entries: &[OutboxEntry], answers: &Answers, now: Timestamp) -> EventDelivery {
        let mut delivery = EventDelivery::default();
        for (index, entry) in entries.iter().enumerate() {
            let mut left = Vec::new();
            let mut is_kept = false;
            for event in &entry.events {
                let place = (index, event.order);
                if let Some(error) = answers.rejected.get(&place) {
                    delivery.rejected.push(self.rejected(entry, *event, error, now));
                    is_kept |= !entry.is_batch;
                } else if !answers.accepted.contains(&place) {
                    left.push(event.order);
                }
            }
            if left.is_empty() && !is_kept {
                delivery.done.push(entry.id);
            } else if entry.is_batch && left.len() < entry.events.len() {
                delivery.left.push((entry.id, left));
            }
        }
        delivery
    }

    fn rejected(&self, entry: &OutboxEntry, event: OutgoingEvent, error: &str, now: Timestamp) -> RejectedEvent {
        let tries = entry.tries + 1;
        let pause = super::doubled(self.config.retry_pause, tries).min(MAX_PAUSE);
        let next_at = (tries < MAX_TRIES).then(|| now.plus(pause));
        tracing::warn!(order = %event.order, to = event.step.to.as_str(), tries, error, "an event was rejected");
        RejectedEvent { entry: entry.id, from_batch: entry.is_batch, event, tries, next_at, error: error.to_owned() }
    }

    /// Raises an alert, one for all events of a sale.
    async fn report(&self, rejected: &RejectedEvent) {
        let RejectedEvent { event, tries, error, .. } = rejected;
        let (order, to) = (event.order, event.step.to.as_str());
        let message = format!(
            "the event that order {order} is {to} was rejected {tries} times and is set aside, with later ones of the order: {error}"
        );
        self.alerts.raise(AlertKind::EventRejected, format!("sale {}", event.sale), message).await;
    }
}

#[cfg(test)]
mod tests;
