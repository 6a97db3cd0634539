//! The worker on a real ledger, with a receiver that rejects some events, or is away.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use stampede_core::clock::ManualClock;
use stampede_core::ports::{Admitted, RecordOutcome, SaleDraft, ScheduledWork, Stores};
use stampede_core::{
    Epoch, Money, OrderStatus, SaleId, SaleStatus, Shop, ShopId, ShopTypeId, UserId, Voucher, VoucherId, VoucherKind,
    Window,
};
use stampede_ledger::{Database, LedgerConfig, open_with};
use stampede_testkit::until;

use super::*;
use crate::alerts::AlertConfig;
use crate::events::EventSender;

/// In the past, so that the clock of the database, which is not set, is never the earlier one.
const NOW: Timestamp = Timestamp::from_ms(1_700_000_000_000);

#[derive(Debug, Default)]
struct Receiver {
    is_away: AtomicBool,
    /// Goes away after this many further messages, if it is not 0.
    leaves_after: AtomicUsize,
    /// The orders whose events it rejects.
    rejects: Mutex<HashSet<OrderId>>,
    /// All messages, those too that were not accepted.
    messages: Mutex<Vec<Vec<OutgoingEvent>>>,
    accepted: Mutex<Vec<OutgoingEvent>>,
}

#[async_trait]
impl EventSender for Receiver {
    async fn send(&self, events: &[OutgoingEvent]) -> Result<(), EventError> {
        self.messages.lock().push(events.to_vec());
        if self.is_away.load(Ordering::SeqCst) {
            return Err(EventError::Unavailable("away".into()));
        }
        if self.leaves_after.load(Ordering::SeqCst) > 0 && self.leaves_after.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.is_away.store(true, Ordering::SeqCst);
        }
        let rejects = self.rejects.lock();
        if events.iter().any(|event| rejects.contains(&event.order)) {
            return Err(EventError::Rejected("it returned 422".into()));
        }
        self.accepted.lock().extend(events);
        Ok(())
    }
}

impl Receiver {
    /// The statuses of each order as they were accepted. One that is repeated, and nothing else, may come after a later one.
    fn histories(&self) -> BTreeMap<OrderId, Vec<OrderStatus>> {
        let mut histories: BTreeMap<OrderId, Vec<OrderStatus>> = BTreeMap::new();
        for event in self.accepted.lock().iter() {
            let history = histories.entry(event.order).or_default();
            if !history.contains(&event.step.to) {
                assert!(history.last().is_none_or(|last| *last == event.step.from), "{event:?} after {history:?}");
                history.push(event.step.to);
            }
        }
        histories
    }

    fn reject(&self, orders: &[i64]) {
        *self.rejects.lock() = orders.iter().copied().map(order).collect();
    }
}

struct Fixture {
    worker: EventWorker,
    receiver: Arc<Receiver>,
    clock: Arc<ManualClock>,
    stores: Stores,
    sale: SaleId,
    _folder: tempfile::TempDir,
}

fn order(id: i64) -> OrderId {
    OrderId::new(id).unwrap()
}

fn user(id: i64) -> UserId {
    UserId::new(id).unwrap()
}

impl Fixture {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::Sqlite(folder.path().join("db"));
        let stores = open_with(&database, LedgerConfig { writes_events: true }).await.unwrap();
        let shop = Shop {
            id: ShopId::new(1).unwrap(),
            type_id: ShopTypeId::new(1).unwrap(),
            name: "s".into(),
            address: String::new(),
        };
        stores.catalogue.create_shop(&shop).await.unwrap();
        let voucher = Voucher {
            id: VoucherId::new(1).unwrap(),
            shop: shop.id,
            kind: VoucherKind::FlashSale,
            title: "t".into(),
            subtitle: String::new(),
            rules: String::new(),
            price: Money::from_cents(100).unwrap(),
            worth: Money::from_cents(200).unwrap(),
            on_shelf: true,
        };
        stores.catalogue.create_voucher(&voucher).await.unwrap();
        let sale = SaleId::new(1).unwrap();
        let draft = SaleDraft {
            id: sale,
            voucher: voucher.id,
            stock: 10_000,
            window: Window { begin: NOW, end: NOW.plus(Duration::from_secs(3600)) },
            status: SaleStatus::OnSale,
            payment_deadline_ms: 0,
            buy_again: true,
        };
        stores.ledger.create_sale(draft, NOW).await.unwrap();
        let (receiver, clock) = (Arc::new(Receiver::default()), Arc::new(ManualClock::at(NOW)));
        let alerts = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
        let worker = EventWorker {
            ledger: stores.ledger.clone(),
            clock: clock.clone(),
            config: EventConfig { sender: receiver.clone(), retry_pause: Duration::from_secs(1) },
            alerts: Arc::new(Alerts::new(alerts, stores.ledger.clone())),
            schedule: Schedule::new(ScheduledWork::DeliverEvents, None).unwrap(),
        };
        Self { worker, receiver, clock, stores, sale, _folder: folder }
    }

    async fn record(&self, orders: std::ops::RangeInclusive<i64>) {
        let admitted = |id| Admitted { order: order(id), user: user(id), seq: id, at: NOW };
        let batch: Vec<Admitted> = orders.map(admitted).collect();
        let outcomes = self.stores.ledger.record(self.sale, Epoch(1), &batch).await.unwrap();
        assert!(outcomes.iter().all(|outcome| *outcome == RecordOutcome::Inserted));
    }

    async fn cancel(&self, id: i64) {
        self.stores.ledger.cancel(order(id), user(id), NOW).await.unwrap();
    }

    /// Delivers until nothing is due or the receiver is away.
    async fn deliver(&self) {
        let sent = Counter::noop();
        while let Some(round) = self.worker.deliver_due(&sent).await.unwrap() {
            if round.is_unavailable {
                return;
            }
        }
    }

    fn advance(&self, span: Duration) {
        self.clock.set(self.clock.now().plus(span));
    }

    async fn waiting(&self) -> u64 {
        self.stores.ledger.count_events().await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_loses_and_reorders_nothing() {
    let fixture = Fixture::new().await;
    fixture.record(1..=450).await;
    fixture.cancel(7).await;
    let receiver = &fixture.receiver;
    receiver.is_away.store(true, Ordering::SeqCst);
    for _ in 0..20 {
        fixture.deliver().await;
        fixture.advance(Duration::from_secs(60));
    }
    assert_eq!(receiver.messages.lock().len(), 20, "one attempt each time");
    assert_eq!((fixture.waiting().await, fixture.stores.ledger.failed_events(10).await.unwrap().len()), (2, 0));
    // It goes away again after the first message of three.
    receiver.is_away.store(false, Ordering::SeqCst);
    receiver.leaves_after.store(1, Ordering::SeqCst);
    fixture.deliver().await;
    assert_eq!(receiver.accepted.lock().len(), MAX_EVENTS);
    fixture.cancel(450).await;
    receiver.is_away.store(false, Ordering::SeqCst);
    fixture.deliver().await;
    assert_eq!(fixture.waiting().await, 0);
    assert_eq!(receiver.accepted.lock().len(), 452, "nothing was sent again that was accepted");
    assert!(receiver.messages.lock().iter().all(|message| message.len() <= MAX_EVENTS));
    let histories = receiver.histories();
    assert_eq!(histories.len(), 450);
    for (id, history) in histories {
        let cancelled = [7, 450].contains(&id.get());
        let expected: &[_] =
            if cancelled { &[OrderStatus::Unpaid, OrderStatus::Cancelled] } else { &[OrderStatus::Unpaid] };
        assert_eq!(history, expected, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_event_holds_up_no_other_order() {
    let fixture = Fixture::new().await;
    fixture.record(1..=300).await;
    for id in [150, 151] {
        fixture.cancel(id).await;
    }
    let (receiver, ledger) = (&fixture.receiver, &fixture.stores.ledger);
    receiver.reject(&[150]);
    fixture.deliver().await;
    assert_eq!(receiver.histories().len(), 299);
    assert_eq!(receiver.histories()[&order(151)], [OrderStatus::Unpaid, OrderStatus::Cancelled]);
    assert!(receiver.messages.lock().len() < 40, "a message is halved until the event is known");
    assert_eq!(fixture.waiting().await, 2, "its events, each in an entry of its own");

    let mut tries = 1;
    while ledger.failed_events(10).await.unwrap().len() < 2 {
        let before = receiver.messages.lock().len();
        fixture.deliver().await;
        assert_eq!(receiver.messages.lock().len(), before, "it waits");
        fixture.advance(MAX_PAUSE);
        fixture.deliver().await;
        tries += 1;
        assert!(tries <= MAX_TRIES);
    }
    assert_eq!(tries, MAX_TRIES);
    fixture.record(301..=301).await;
    fixture.advance(Duration::from_secs(3600));
    let before = receiver.messages.lock().len();
    fixture.deliver().await;
    assert_eq!(receiver.messages.lock().len(), before + 1, "what is set aside is not sent");

    receiver.reject(&[]);
    assert_eq!(ledger.retry_events(Some(order(150))).await.unwrap(), 2);
    fixture.deliver().await;
    assert_eq!(receiver.histories()[&order(150)], [OrderStatus::Unpaid, OrderStatus::Cancelled]);
    assert_eq!((receiver.histories().len(), fixture.waiting().await), (301, 0));
}

/// A receiver that rejects everything is asked about a few events at a time, and not without pauses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_round_of_rejections_is_followed_by_a_pause() {
    let fixture = Fixture::new().await;
    let orders: Vec<i64> = (1..=3 * MAX_REJECTED as i64).collect();
    fixture.record(1..=3 * MAX_REJECTED as i64).await;
    fixture.receiver.reject(&orders);
    let Fixture { worker, receiver, _folder, .. } = fixture;
    let (started, pause) = (Instant::now(), worker.config.retry_pause);
    let running = tokio::spawn(worker.run());
    until("every event was sent alone", async || {
        let messages = receiver.messages.lock();
        let alone: HashSet<OrderId> =
            messages.iter().filter(|message| message.len() == 1).map(|message| message[0].order).collect();
        alone.len() == orders.len()
    })
    .await;
    assert!(started.elapsed() >= 2 * pause, "{:?}", started.elapsed());
    running.abort();
}

/// Many events are rejected at once, more than there are entries in a page: the others arrive all the same, and all once they are accepted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_rejected_events_hold_up_no_other_order() {
    let fixture = Fixture::new().await;
    let rejected: Vec<i64> = (1..=250).collect();
    fixture.record(1..=260).await;
    for id in 1..=260 {
        fixture.cancel(id).await;
    }
    let receiver = &fixture.receiver;
    receiver.reject(&rejected);
    for _ in 0..MAX_TRIES {
        fixture.deliver().await;
        fixture.advance(MAX_PAUSE);
    }
    fixture.deliver().await;
    let histories = receiver.histories();
    assert!(histories.keys().all(|id| id.get() > 250), "{histories:?}");
    assert!(histories.values().all(|history| history.len() == 2), "{histories:?}");
    assert_eq!((histories.len(), fixture.waiting().await), (10, 500));
    assert_eq!(fixture.stores.ledger.failed_events(1000).await.unwrap().len(), 500);

    receiver.reject(&[]);
    assert_eq!(fixture.stores.ledger.retry_events(None).await.unwrap(), 500);
    while fixture.waiting().await > 0 {
        fixture.deliver().await;
        fixture.advance(HOLD);
    }
    assert!(receiver.histories().values().all(|history| history.len() == 2));
    assert_eq!(receiver.histories().len(), 260);
}
