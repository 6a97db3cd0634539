//! Orders whose data the ledger rejects: they are isolated, and only they go into quarantine.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stampede_core::ports::RecordOutcome;
use stampede_core::*;
use stampede_engine::{Bought, Error};
use stampede_testkit::until;

use crate::faulty::{Cut, Faults};
use crate::outages::faulty;
use crate::tier::{CONFIG, SOLO, Tier, user};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_in_which_every_order_fails_is_treated_as_an_outage() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    *faults.poison.lock().unwrap() = (2..=9).map(user).collect();
    let answers = buy_as_one_batch(&tier, &faults, 2..=9).await;
    assert!(answers.iter().all(|answer| answer.as_ref().unwrap_err().code() == Code::OutcomeUnknown), "{answers:?}");
    let first_alone = faults.calls();
    // The first call had one order or more; all the others came together. None of those goes into quarantine, however long it lasts.
    let deadline = Instant::now() + SOLO.quarantine_after * 3;
    until("three times the time has passed", async || Instant::now() > deadline).await;
    assert!(faults.calls() > first_alone, "they are tried again");
    let quarantined = tier.stores.ledger.quarantined(None, 10).await.unwrap();
    assert!(quarantined.len() <= 1, "only the one that came alone: {quarantined:?}");

    faults.poison.lock().unwrap().clear();
    for order in &quarantined {
        tier.engine.retry_quarantined(order.admitted.order).await.unwrap();
    }
    until("all are recorded", async || tier.stores.ledger.load(tier.sale).await.unwrap().unwrap().sale.sold == 8).await;
    assert_eq!(tier.check_at_rest().await, 8);
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
