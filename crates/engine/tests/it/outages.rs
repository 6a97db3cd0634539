//! Buying while the ledger fails, and while another process sells from the same ledger.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{Admitted, RecordOutcome};
use stampede_core::*;
use stampede_engine::{Bought, Config, Error};

use crate::faulty::{Cut, Faults, Faulty};
use crate::tier::{CONFIG, SOLO, Tier, tier, user};

pub async fn faulty(config: Config, stock: u32) -> (Tier, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let wire = faults.clone();
    let tier = tier(config, stock, |inner| Arc::new(Faulty { inner, faults: wire })).await;
    (tier, faults)
}

fn order(bought: &Bought) -> (OrderId, bool) {
    (bought.id(), bought.is_already())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outcome_is_known_after_any_failure_of_a_commit() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    for (n, cut) in (1..).zip([Cut::Before, Cut::After, Cut::Panic]) {
        faults.cuts.lock().unwrap().extend([cut, cut, Cut::Before, cut]);
        let bought = tier.engine.buy(tier.sale, user(n)).await.unwrap();
        let row = tier.stores.ledger.order(bought.id()).await.unwrap().unwrap();
        // Until when it must be paid is known only if the row was read: the ledger's clock decides that.
        let answer = bought.order().unwrap();
        assert!(answer.pay_by.is_none() || answer.pay_by == row.pay_by, "after {cut:?}");
        assert_eq!(row, Order { pay_by: row.pay_by, ..answer.clone() }, "after {cut:?}");
        assert!(!bought.is_already());
    }
    assert_eq!(tier.check_at_rest().await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buyer_who_timed_out_gets_the_order_on_the_next_request() {
    let mut config = CONFIG;
    config.answer_timeout = Duration::from_millis(100);
    let (tier, faults) = faulty(config, 1).await;
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_millis(300)));
    let unknown = tier.engine.buy(tier.sale, user(1)).await.unwrap_err();
    assert!(matches!(unknown, Error::OutcomeUnknown), "{unknown:?}");
    let refused = tier.engine.buy(tier.sale, user(2)).await.unwrap_err();
    assert!(matches!(refused, Error::Refused(Refusal::SoldOut)), "its stock is not given away: {refused:?}");
    let bought = loop {
        match tier.engine.buy(tier.sale, user(1)).await {
            Ok(bought) => break bought,
            Err(Error::OutcomeUnknown) => {}
            Err(other) => panic!("{other:?}"),
        }
    };
    assert!(bought.is_already());
    let row = tier.stores.ledger.order(bought.id()).await.unwrap();
    assert_eq!(row.as_ref(), bought.order());
    assert_eq!(tier.check_at_rest().await, 1);
}

/// Callers that go away at any moment leave no order without an outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_of_callers_that_go_away_are_recorded() {
    let (tier, faults) = faulty(CONFIG, 50).await;
    faults.cuts.lock().unwrap().extend([Cut::Slow(Duration::from_millis(20)); 20]);
    for n in 1..=40 {
        let patience = Duration::from_micros(u64::try_from(n).unwrap() * 700);
        let _gone = tokio::time::timeout(patience, tier.engine.buy(tier.sale, user(n))).await;
    }
    let mut ids = std::collections::HashSet::new();
    for n in 1..=40 {
        assert!(ids.insert(tier.engine.buy(tier.sale, user(n)).await.unwrap().id()));
    }
    assert_eq!(tier.check_at_rest().await, 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buyers_get_busy_at_the_bound_and_no_mark_is_left() {
    let (tier, faults) = faulty(CONFIG, 1000).await;
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_millis(300)));
    let tries: Vec<_> = (1..=300)
        .map(|n| {
            let (engine, sale) = (tier.engine.clone(), tier.sale);
            tokio::spawn(async move { engine.buy(sale, user(n)).await })
        })
        .collect();
    let (mut bought, mut busy) = (0, 0);
    for one in tries {
        match one.await.unwrap() {
            Ok(_) => bought += 1,
            Err(Error::Busy) => busy += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!((bought + busy, busy > 0), (300, true));
    assert!(bought <= SOLO.queue_per_sale + SOLO.max_batch);
    assert_eq!(tier.check_at_rest().await as usize, bought);
}

/// Another process sells from the same stock: buyers get the real reason, and the gate is reloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gate_is_reloaded_when_the_ledger_refuses_an_order() {
    let tier = tier(CONFIG, 3, |inner| inner).await;
    let elsewhere =
        |n: i64| Admitted { order: OrderId::new(n).unwrap(), user: user(n), seq: n, at: tier.engine.clock().now() };
    let sold = tier.stores.ledger.record(tier.sale, Epoch(1), &[elsewhere(1), elsewhere(2)]).await.unwrap();
    assert_eq!(sold, [RecordOutcome::Inserted; 2]);

    let mine = tier.engine.buy(tier.sale, user(1)).await.unwrap();
    assert_eq!(order(&mine), (OrderId::new(1).unwrap(), true), "bought elsewhere, given back here");
    assert_eq!(tier.engine.sale(tier.sale).await.unwrap().remaining, 1, "the sale was reloaded");
    assert!(!tier.engine.buy(tier.sale, user(3)).await.unwrap().is_already());
    let refused = tier.engine.buy(tier.sale, user(4)).await.unwrap_err();
    assert!(matches!(refused, Error::Refused(Refusal::SoldOut)), "{refused:?}");
    assert_eq!(tier.check_at_rest().await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_cancelled_by_another_process_can_be_bought_again() {
    let tier = tier(CONFIG, 1, |inner| inner).await;
    let first = tier.engine.buy(tier.sale, user(1)).await.unwrap();
    tier.stores.ledger.cancel(first.id(), user(1), tier.engine.clock().now()).await.unwrap();
    let second = tier.engine.buy(tier.sale, user(1)).await.unwrap();
    assert!(!second.is_already());
    assert_ne!(second.id(), first.id(), "the dead order is not shown as if it lived");
    assert_eq!(tier.check_at_rest().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_records_every_order_and_returns_the_worker_number() {
    let (tier, faults) = faulty(CONFIG, 10).await;
    faults.cuts.lock().unwrap().push_back(Cut::Slow(Duration::from_millis(200)));
    let (engine, sale) = (tier.engine.clone(), tier.sale);
    let buying = tokio::spawn(async move { engine.buy(sale, user(1)).await });
    while !faults.cuts.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert!(tier.engine.shut_down(Duration::from_secs(10)).await);
    assert!(buying.await.unwrap().is_ok());
    assert!(tier.engine.buy(tier.sale, user(2)).await.is_err(), "closed");
}
