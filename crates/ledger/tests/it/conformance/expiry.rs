//! Orders that are not paid in time.

use super::*;

const DEADLINE: Duration = Duration::from_secs(60);
const DEADLINE_MS: u32 = 60_000;

/// Expires what is due. Returns how many orders were cancelled, and whether more may be due.
async fn expire(stores: &Stores, due: Timestamp, limit: u32) -> (u64, bool) {
    let expired = stores.ledger.expire_orders(due, limit, &[]).await.unwrap();
    assert!(expired.failed.is_empty(), "{expired:?}");
    (expired.orders, expired.more)
}

pub async fn unpaid_orders_expire_once_they_are_due(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_with_deadline(stores, 3, DEADLINE_MS).await;
    assert_eq!(ledger.next_payment_due().await.unwrap(), None);
    // The first batch takes the fast path; the second does not, because it has more orders than there is stock.
    record(stores, sale, &[(1, 1), (4, 2)]).await;
    record(stores, sale, &[(2, 3), (3, 4)]).await;
    // The clock of the database is behind the time of the admission.
    let due = NOW.plus(DEADLINE);
    for id in [1, 2, 4] {
        assert_eq!(ledger.order(order(id)).await.unwrap().unwrap().pay_by, Some(due), "order {id}");
    }
    assert_eq!(ledger.order(order(3)).await.unwrap().unwrap().pay_by, None, "it was rejected");
    assert_eq!(ledger.next_payment_due().await.unwrap(), Some(due));
    ledger.cancel(order(2), user(3), NOW).await.unwrap();
    let early = due.minus(Duration::from_millis(1));
    assert_eq!(expire(stores, early, 10).await, (0, false));
    assert_eq!(check(stores, sale).await, 2);

    assert_eq!(expire(stores, due, 10).await, (2, false));
    assert_eq!(expire(stores, due, 10).await, (0, false));
    assert_eq!(ledger.next_payment_due().await.unwrap(), None);
    assert_eq!(check(stores, sale).await, 0);
    assert_eq!(ledger.sale(sale).await.unwrap().unwrap().released, 3);
    let row = ledger.order(order(1)).await.unwrap().unwrap();
    assert_eq!((row.status, row.updated_at), (OrderStatus::Cancelled, due));
    let history = ledger.order_history(order(1)).await.unwrap();
    let last = history.last().unwrap();
    assert_eq!((last.from, last.to, last.at), (OrderStatus::Unpaid, OrderStatus::Cancelled, due));
    assert_eq!((last.reason, last.by), (Some(StepReason::Expired), Actor::System));
    let asked = ledger.order_history(order(2)).await.unwrap();
    assert_eq!(asked.last().unwrap().reason, Some(StepReason::Requested), "cancelled before");
    let releases = ledger.pending_releases(None, 10).await.unwrap();
    assert_eq!(releases.iter().map(|release| release.order.get()).collect::<Vec<_>>(), [1, 2, 4]);
    assert_eq!(record(stores, sale, &[(1, 1)]).await, [RecordOutcome::Dead], "a late duplicate revives nothing");
    assert_eq!(record(stores, sale, &[(5, 1)]).await, [RecordOutcome::Inserted], "the stock is sold again");
}

/// An order that waited for the ledger for long can be paid as long as any other.
pub async fn late_recording_leaves_the_whole_time_to_pay(stores: &Stores) {
    let sale = sale_with_deadline(stores, 10, DEADLINE_MS).await;
    let before = stores.ledger.now().await.unwrap();
    let admitted_at = before.minus(DEADLINE * 10);
    let late = |id| Admitted { at: admitted_at, ..admitted(id, id) };
    // On the fast path, and on the slow one.
    for batch in [vec![late(1)], vec![late(1), late(2)]] {
        stores.ledger.record(sale, E1, &batch).await.unwrap();
    }
    let after = stores.ledger.now().await.unwrap();
    for id in [1, 2] {
        let order = stores.ledger.order(order(id)).await.unwrap().unwrap();
        let pay_by = order.pay_by.unwrap();
        assert_eq!(order.created_at, admitted_at);
        assert!(pay_by >= before.plus(DEADLINE) && pay_by <= after.plus(DEADLINE), "{pay_by:?}");
    }
    assert_eq!(expire(stores, after, 10).await, (0, false));
    assert_eq!(check(stores, sale).await, 2);
}

pub async fn sales_without_a_deadline_never_expire(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    record(stores, sale, &[(2, 2), (3, 3)]).await;
    assert_eq!(stores.ledger.next_payment_due().await.unwrap(), None);
    let far = NOW.plus(Duration::from_secs(1_000_000));
    assert_eq!(expire(stores, far, 10).await, (0, false));
    assert_eq!(check(stores, sale).await, 3);
}

/// Four processes expire the same orders of two sales, in more than one step each, while buyers cancel and buy.
pub async fn concurrent_expiry_returns_stock_once(stores: &Stores) {
    let sale = sale_with_deadline(stores, 3000, DEADLINE_MS).await;
    let other = own_orders::another_sale(stores, 1).await;
    for batch in 0..30_i64 {
        // The ids of the batches overlap.
        let pairs: Vec<(i64, i64)> = (0..50).map(|n| (1 + batch + 30 * n, 1 + batch + 30 * n)).collect();
        assert_eq!(record(stores, sale, &pairs).await, vec![RecordOutcome::Inserted; 50]);
    }
    record(stores, other, &[(5001, 1), (5002, 2)]).await;
    let due = NOW.plus(DEADLINE);
    let workers = (0..4).map(|_| {
        let stores = stores.clone();
        tokio::spawn(async move {
            let mut orders = 0;
            loop {
                let (done, more) = expire(&stores, due, 7).await;
                orders += done;
                if !more {
                    return orders;
                }
            }
        })
    });
    let workers: Vec<_> = workers.collect();
    let mut cancelled = 0;
    for id in (1..=1500).step_by(7) {
        let done = stores.ledger.cancel(order(id), user(id), due).await.unwrap();
        cancelled += u64::from(matches!(done, TransitionOutcome::Done(_)));
    }
    let mut orders = 0;
    for worker in workers {
        orders += worker.await.unwrap();
    }
    // A worker that found nothing more may have ended before another one has.
    assert_eq!(expire(stores, due, 1000).await, (0, false));
    assert_eq!(orders + cancelled, 1500);
    assert_eq!(check(stores, sale).await, 0);
    assert_eq!(check(stores, other).await, 2, "the other sale has no deadline");
    assert_eq!(stores.ledger.pending_releases(None, 5000).await.unwrap().len(), 1500);
    let row = stores.ledger.sale(sale).await.unwrap().unwrap();
    assert_eq!((row.sold, row.released), (0, 1500));
}

/// A sale is left out that has more batches than are read at once.
pub async fn sales_can_be_left_out_of_expiry(stores: &Stores) {
    let sale = sale_with_deadline(stores, 20, DEADLINE_MS).await;
    let other = own_orders::another_sale_with_deadline(stores, 1, DEADLINE_MS).await;
    for id in 1..=12 {
        record(stores, sale, &[(id, id)]).await;
    }
    record(stores, other, &[(100, 1), (101, 2)]).await;
    let due = NOW.plus(DEADLINE);
    let without = stores.ledger.expire_orders(due, 10, &[sale]).await.unwrap();
    assert_eq!((without.orders, without.more, without.failed.len()), (2, false, 0));
    assert_eq!((check(stores, sale).await, check(stores, other).await), (12, 0));
    assert_eq!(expire(stores, due, 10).await, (10, true));
    assert_eq!(expire(stores, due, 10).await, (2, false));
    assert_eq!(check(stores, sale).await, 0);
}

/// Recorded in batches of the usual size, and cancelled as the worker does, in many transactions.
pub async fn orders_that_fall_due_together_expire_within_seconds(stores: &Stores) {
    let orders = stampede_testkit::count(100_000, 3000) as i64;
    let sale = sale_with_deadline(stores, u32::try_from(orders).unwrap(), DEADLINE_MS).await;
    let ids: Vec<i64> = (1..=orders).collect();
    for ids in ids.chunks(256) {
        let pairs: Vec<(i64, i64)> = ids.iter().map(|id| (*id, *id)).collect();
        record(stores, sale, &pairs).await;
    }
    let (started, mut expired) = (std::time::Instant::now(), 0);
    loop {
        let (done, more) = expire(stores, NOW.plus(DEADLINE), 400).await;
        expired += done;
        if !more {
            break;
        }
    }
    let elapsed = started.elapsed();
    eprintln!("{expired} orders expired in {elapsed:?}");
    assert_eq!(i64::try_from(expired), Ok(orders));
    assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
    assert_eq!(check(stores, sale).await, 0);
}
