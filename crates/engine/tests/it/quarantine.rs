//! Orders whose data the ledger rejects: they are isolated, and only they go into quarantine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use parking_lot::Mutex;
use stampede_core::ports::RecordOutcome;
use stampede_core::*;
use stampede_engine::{Alert, AlertConfig, AlertKind, AlertSender, Bought, Config, Error, SoloConfig, TierConfig};
use stampede_testkit::until;

use crate::config::ALERTS;
use crate::faulty::{Cut, Faults};
use crate::outages::faulty;
use crate::tier::{CONFIG, SOLO, Tier, user};

#[derive(Debug, Default)]
struct Received(Mutex<Vec<Alert>>);

#[async_trait]
impl AlertSender for Received {
    async fn send(&self, alert: &Alert) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.0.lock().push(alert.clone());
        Ok(())
    }
}

/// The value of a metric without labels.
fn metric(metrics: &PrometheusHandle, name: &str) -> f64 {
    let text = metrics.render();
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Buys for `users` at once, such that those after the first come as one batch.
async fn buy_as_one_batch(
    tier: &Tier,
    faults: &Faults,
    users: std::ops::RangeInclusive<i64>,
) -> Vec<Result<Bought, Error>> {
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_millis(100)));
    let tries: Vec<_> = users
        .map(|n| {
            let (engine, sale) = (tier.engine.clone(), tier.sale);
            tokio::spawn(async move { engine.buy(sale, user(n)).await })
        })
        .collect();
    let mut answers = Vec::new();
    for one in tries {
        answers.push(one.await.unwrap());
    }
    answers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_order_is_quarantined_and_the_others_are_recorded() {
    let (tier, faults) = faulty(CONFIG, 20).await;
    let ledger = &tier.stores.ledger;
    faults.poison.lock().unwrap().push(user(5));
    let started = Instant::now();
    let answers = buy_as_one_batch(&tier, &faults, 1..=16).await;
    for (n, answer) in (1..).zip(answers) {
        match answer {
            Ok(bought) => assert_eq!(bought.order().map(|order| order.user), Some(user(n))),
            Err(error) => assert_eq!((n, error.code()), (5, Code::OutcomeUnknown)),
        }
    }
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), [], "not at the first try");
    until("the order is quarantined", async || !ledger.quarantined(None, 10).await.unwrap().is_empty()).await;
    assert!(started.elapsed() >= SOLO.quarantine_after);
    let loaded = ledger.load(tier.sale).await.unwrap().unwrap();
    assert_eq!((loaded.sale.sold, loaded.marks.len()), (15, 16), "it keeps its mark until an operator acts");
    assert_eq!(tier.engine.sale(tier.sale).await.unwrap().remaining, 4);

    // Its buyer gets `outcome_unknown`; a retry that fails returns the database's message and changes nothing.
    let id = tier.engine.quarantined(None, 10).await.unwrap()[0].admitted.order;
    assert_eq!(tier.engine.buy(tier.sale, user(5)).await.unwrap_err().code(), Code::OutcomeUnknown);
    assert_eq!(tier.engine.quarantined_order(id).await.unwrap().admitted.user, user(5));

    faults.poison.lock().unwrap().clear();
    assert_eq!(tier.engine.retry_quarantined(id).await.unwrap(), RecordOutcome::Inserted);
    let bought = tier.engine.buy(tier.sale, user(5)).await.unwrap();
    assert_eq!((bought.id(), bought.is_already()), (id, true));
    assert_eq!(tier.check_at_rest().await, 16);
    assert_eq!(tier.engine.retry_quarantined(id).await.unwrap_err().code(), Code::NoSuchOrder);
}

/// A bad order that comes alone is tried eight times before it goes into quarantine, also if the time after which it may is shorter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_order_is_tried_eight_times() {
    for quarantine_after in [Duration::from_millis(1), SOLO.quarantine_after] {
        let solo = TierConfig::Solo(SoloConfig { quarantine_after, ..SOLO });
        let (tier, faults) = faulty(Config { tier: solo, ..CONFIG }, 10).await;
        let ledger = &tier.stores.ledger;
        faults.poison.lock().unwrap().push(user(1));
        let started = Instant::now();
        assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap_err().code(), Code::OutcomeUnknown);
        until("the order is quarantined", async || !ledger.quarantined(None, 10).await.unwrap().is_empty()).await;
        assert!(started.elapsed() >= quarantine_after);
        // The last try may come just before the time is over.
        assert!((8..=9).contains(&faults.calls()), "{} tries, {quarantine_after:?}", faults.calls());
        assert_eq!(ledger.load(tier.sale).await.unwrap().unwrap().sale.sold, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discarded_order_returns_its_stock_and_stays_dead() {
    let (tier, faults) = faulty(CONFIG, 1).await;
    faults.poison.lock().unwrap().push(user(1));
    assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap_err().code(), Code::OutcomeUnknown);
    let refused = tier.engine.buy(tier.sale, user(2)).await.unwrap_err();
    assert_eq!(refused.code(), Code::SoldOut, "its stock is taken");
    until("the order is quarantined", async || !tier.engine.quarantined(None, 10).await.unwrap().is_empty()).await;
    let id = tier.engine.quarantined(None, 10).await.unwrap()[0].admitted.order;
    // A database that rejects even the `rejected` row: the operator gets its message, and the order stays in quarantine.
    faults.rejects_discards.store(true, Ordering::SeqCst);
    assert_eq!(tier.engine.discard_quarantined(id).await.unwrap_err().code(), Code::NotRecordable);
    assert_eq!(tier.engine.quarantined(None, 10).await.unwrap().len(), 1);
    faults.rejects_discards.store(false, Ordering::SeqCst);
    tier.engine.discard_quarantined(id).await.unwrap();
    until("the mark is released", async || tier.engine.sale(tier.sale).await.unwrap().remaining == 1).await;
    assert_eq!(tier.stores.ledger.order(id).await.unwrap().unwrap().status, OrderStatus::Rejected);
    assert!(!tier.engine.buy(tier.sale, user(2)).await.unwrap().is_already());
    assert_eq!(tier.check_at_rest().await, 1);
    assert_eq!(tier.engine.discard_quarantined(id).await.unwrap_err().code(), Code::NoSuchOrder);
}

/// Its buyer cancels an order that is in quarantine, while the database rejects it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quarantined_order_can_be_cancelled() {
    let (tier, faults) = faulty(CONFIG, 1).await;
    faults.poison.lock().unwrap().push(user(1));
    assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap_err().code(), Code::OutcomeUnknown);
    until("the order is quarantined", async || !tier.engine.quarantined(None, 10).await.unwrap().is_empty()).await;
    let id = tier.engine.quarantined(None, 10).await.unwrap()[0].admitted.order;
    assert_eq!(tier.engine.cancel(id, user(2), None).await.unwrap_err().code(), Code::NoSuchOrder);
    assert_eq!(tier.engine.cancel(id, user(1), None).await.unwrap().status, OrderStatus::Cancelled);
    assert_eq!(tier.engine.quarantined(None, 10).await.unwrap(), []);
    assert_eq!(tier.engine.sale(tier.sale).await.unwrap().remaining, 1, "its mark is released");
    assert!(!tier.engine.buy(tier.sale, user(2)).await.unwrap().is_already());
    assert_eq!(tier.check_at_rest().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_failure_quarantines_nothing() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    faults.poison.lock().unwrap().push(user(1));
    assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap_err().code(), Code::OutcomeUnknown);
    faults.poison.lock().unwrap().clear();
    until("the order is recorded", async || tier.stores.ledger.load(tier.sale).await.unwrap().unwrap().sale.sold == 1)
        .await;
    assert!(tier.engine.buy(tier.sale, user(1)).await.unwrap().is_already());
    assert_eq!(tier.stores.ledger.quarantined(None, 10).await.unwrap(), []);
    assert_eq!(tier.check_at_rest().await, 1);
}

/// Nothing is quarantined, and the operator is told. On one thread, so that the metrics are those of this engine.
#[tokio::test]
async fn batch_in_which_every_order_fails_is_treated_as_an_outage() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let metrics = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let received = Arc::new(Received::default());
    let alerts = AlertConfig { sender: Some(received.clone()), ..ALERTS };
    let (tier, faults) = faulty(Config { alerts, ..CONFIG }, 10).await;
    *faults.poison.lock().unwrap() = (2..=9).map(user).collect();
    let answers = buy_as_one_batch(&tier, &faults, 2..=9).await;
    assert!(answers.iter().all(|answer| answer.as_ref().unwrap_err().code() == Code::OutcomeUnknown), "{answers:?}");
    let first_alone = faults.calls();
    // The first call had one order or more; all the others came together. None of those goes into quarantine, however long it lasts.
    let deadline = Instant::now() + SOLO.quarantine_after * 3;
    until("three times the time has passed", async || Instant::now() > deadline).await;
    assert!(faults.calls() > first_alone, "they are tried again");
    let not_recorded = || {
        let received = received.0.lock();
        received.iter().find(|alert| alert.kind == AlertKind::NotRecorded).cloned()
    };
    until("an alert is raised", async || not_recorded().is_some()).await;
    let alert = not_recorded().unwrap();
    assert_eq!(alert.about, format!("sale {}", tier.sale));
    assert!(alert.message.contains("cannot hold this"), "{alert:?}");
    assert!(metric(&metrics, "stampede_commit_retries_total") >= 1.0);
    let quarantined = tier.stores.ledger.quarantined(None, 10).await.unwrap();
    assert!(quarantined.len() <= 1, "only the one that came alone: {quarantined:?}");
    assert_eq!(metric(&metrics, "stampede_commit_suspects"), (8 - quarantined.len()) as f64);

    faults.poison.lock().unwrap().clear();
    for order in &quarantined {
        tier.engine.retry_quarantined(order.admitted.order).await.unwrap();
    }
    until("all are recorded", async || tier.stores.ledger.load(tier.sale).await.unwrap().unwrap().sale.sold == 8).await;
    assert_eq!(tier.check_at_rest().await, 8);
    until("none waits", async || metric(&metrics, "stampede_commit_suspects") == 0.0).await;
}

/// Two bad orders in one batch do not block the sale for ever: once another order is recorded, the ledger is known to work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_orders_of_one_batch_are_quarantined_once_another_is_recorded() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    *faults.poison.lock().unwrap() = (2..=4).map(user).collect();
    let _unknown = buy_as_one_batch(&tier, &faults, 2..=4).await;
    assert!(!tier.engine.buy(tier.sale, user(1)).await.unwrap().is_already(), "the queue moves");
    until("all are quarantined", async || tier.stores.ledger.quarantined(None, 10).await.unwrap().len() == 3).await;
    assert_eq!(tier.engine.sale(tier.sale).await.unwrap().remaining, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_that_is_being_recorded_is_counted_as_waiting() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_millis(300)));
    let (engine, sale) = (Arc::clone(&tier.engine), tier.sale);
    let buying = tokio::spawn(async move { engine.buy(sale, user(1)).await });
    until("the batch was taken", async || faults.cuts.lock().unwrap().is_empty()).await;
    assert_eq!(tier.engine.waiting(), 1);
    buying.await.unwrap().unwrap();
    until("nothing waits", async || tier.engine.waiting() == 0).await;
}

/// An order that could not be recorded is recorded when its owner asks again, after the end of the sale: it has a time of its sale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_of_an_owner_who_asks_after_the_end_has_a_time_of_its_sale() {
    // In this time it is tried again only because its owner asks.
    let solo = SoloConfig { quarantine_after: Duration::from_secs(3600), ..SOLO };
    let (tier, faults) = faulty(Config { tier: TierConfig::Solo(solo), ..CONFIG }, 1).await;
    faults.poison.lock().unwrap().push(user(1));
    assert_eq!(tier.engine.buy(tier.sale, user(1)).await.unwrap_err().code(), Code::OutcomeUnknown);
    let end = tier.engine.clock().now().plus(Duration::from_millis(500));
    let change = WindowChange { begin: None, end: Some(end) };
    tier.engine.set_sale_window(tier.sale, change, "ends soon").await.unwrap();
    until("the sale is over", async || tier.engine.clock().now() > end).await;
    faults.poison.lock().unwrap().clear();
    let bought = tier.engine.buy(tier.sale, user(1)).await.unwrap();
    assert!(bought.is_already());
    let row = tier.stores.ledger.order(bought.id()).await.unwrap().unwrap();
    let window = tier.stores.ledger.load(tier.sale).await.unwrap().unwrap().sale.window;
    assert_eq!(window.end, end);
    assert!(row.created_at >= window.begin && row.created_at < end, "{} is not in {window:?}", row.created_at);
    assert_eq!(tier.check_at_rest().await, 1);
}
