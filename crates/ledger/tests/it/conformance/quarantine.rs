//! Orders that could not be recorded.

use stampede_core::ports::{DiscardOutcome, QuarantinedOrder};

use super::*;

pub fn quarantined(sale: SaleId, id: i64, epoch: Epoch, error: &str) -> QuarantinedOrder {
    QuarantinedOrder { sale, epoch, admitted: admitted(id, id), error: error.to_owned(), quarantined_at: NOW }
}

pub async fn quarantined_orders_keep_their_mark_until_an_operator_acts(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 3).await;
    record(stores, sale, &[(1, 1)]).await;
    for error in ["odd", "odd again"] {
        let put = ledger.quarantine(&quarantined(sale, 2, E1, error)).await.unwrap();
        assert_eq!(put, RecordOutcome::Quarantined);
    }
    ledger.quarantine(&quarantined(sale, 3, E1, "odd")).await.unwrap();
    let marks = async || {
        let marks = ledger.load(sale).await.unwrap().unwrap().marks;
        let mut ids: Vec<i64> = marks.iter().map(|(_, order)| order.get()).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(marks().await, [1, 2, 3]);
    let listed = ledger.quarantined(None, 10).await.unwrap();
    assert_eq!(listed, [quarantined(sale, 3, E1, "odd"), quarantined(sale, 2, E1, "odd again")]);
    assert_eq!(ledger.quarantined(Some(order(3)), 10).await.unwrap().len(), 1);
    assert_eq!(ledger.quarantined_order(order(3)).await.unwrap().as_ref(), listed.first());
    assert_eq!(ledger.quarantined_sales().await.unwrap(), [(sale, 2)]);

    // A late duplicate changes nothing and does not affect other orders.
    assert_eq!(record(stores, sale, &[(2, 2), (4, 4)]).await, [RecordOutcome::Quarantined, RecordOutcome::Inserted]);
    let refused = record(stores, sale, &[(2, 9)]).await;
    assert_eq!(refused, [RecordOutcome::IdCollision], "an id in quarantine is another's");

    assert_eq!(ledger.retry_quarantined(order(2)).await.unwrap(), Some(RecordOutcome::Inserted));
    assert_eq!(ledger.retry_quarantined(order(2)).await.unwrap(), None, "once");
    assert_eq!(ledger.quarantined_sales().await.unwrap(), [(sale, 1)]);
    assert_eq!(ledger.order(order(2)).await.unwrap().unwrap().user, user(2));
    assert_eq!(ledger.discard_quarantined(order(3)).await.unwrap(), DiscardOutcome::Done);
    assert_eq!(ledger.discard_quarantined(order(3)).await.unwrap(), DiscardOutcome::NoSuchOrder, "once");
    assert_eq!(ledger.order(order(3)).await.unwrap().unwrap().status, OrderStatus::Rejected);
    assert_eq!(record(stores, sale, &[(3, 3)]).await, [RecordOutcome::Dead], "a discarded order stays dead");
    assert_eq!(
        ledger
            .pending_releases(None, 10)
            .await
            .unwrap()
            .iter()
            .map(|pending_releases| pending_releases.order)
            .collect::<Vec<_>>(),
        [order(3)]
    );
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), []);
    assert_eq!(ledger.quarantined_sales().await.unwrap(), []);
    assert_eq!(marks().await, [1, 2, 4]);
    assert_eq!(check(stores, sale).await, 3);
}

pub async fn quarantine_yields_to_rows_epochs_and_stock(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1)]).await;
    let put = async |id, epoch| ledger.quarantine(&quarantined(sale, id, epoch, "odd")).await.unwrap();
    assert_eq!(put(1, E1).await, RecordOutcome::AlreadyRecorded, "recorded in the meantime");
    let refused = RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None };
    assert_eq!(put(2, Epoch(7)).await, refused, "admitted before a rebuild");
    assert_eq!(put(2, Epoch(7)).await, RecordOutcome::Dead);
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), []);

    assert_eq!(put(3, E1).await, RecordOutcome::Quarantined);
    let refused = RecordOutcome::Rejected { reason: RejectReason::SoldOut, existing: None };
    assert_eq!(ledger.retry_quarantined(order(3)).await.unwrap(), Some(refused));
    assert_eq!(ledger.order(order(3)).await.unwrap().unwrap().status, OrderStatus::Rejected);
    assert_eq!(ledger.pending_releases(None, 10).await.unwrap().len(), 1, "its mark must go");
    assert_eq!(check(stores, sale).await, 1);
}

/// Orders that have a row, one of which is live, are in quarantine as well: discarding them deletes only their entries. `execute` runs a
/// statement in the database, because the ledger puts no order with a row into quarantine.
pub async fn discarded_order_with_a_row_keeps_it(stores: &Stores, execute: impl AsyncFnOnce(&'static str)) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    ledger.cancel(order(2), user(2), NOW).await.unwrap();
    execute(
        "INSERT INTO quarantine (order_id, sale_id, user_id, epoch, seq, admitted_at, error, quarantined_at)
         SELECT id, sale_id, user_id, epoch, seq, created_at, 'odd', created_at FROM orders WHERE id IN (1, 2)",
    )
    .await;
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), [], "they have rows");
    let releases = ledger.pending_releases(None, 10).await.unwrap();
    for id in [order(1), order(2)] {
        let before = ledger.order(id).await.unwrap();
        assert!(before.is_some());
        assert_eq!(ledger.discard_quarantined(id).await.unwrap(), DiscardOutcome::AlreadyRecorded);
        assert_eq!(ledger.discard_quarantined(id).await.unwrap(), DiscardOutcome::NoSuchOrder, "its entry is gone");
        assert_eq!(ledger.order(id).await.unwrap(), before);
    }
    assert_eq!(ledger.pending_releases(None, 10).await.unwrap(), releases, "no mark is released");
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().marks, [(user(1), order(1))]);
    assert_eq!(check(stores, sale).await, 1);
}

/// Begins the next epoch of a sale, as a rebuild of the gate does.
async fn rebuild(stores: &Stores, sale: SaleId) -> Epoch {
    let ledger = &stores.ledger;
    let incarnation = ledger.gate_record("one").await.unwrap().incarnation;
    let next = ledger.begin_rebuild(incarnation, "r").await.unwrap().unwrap();
    let current = ledger.begin_load(sale, E1, next).await.unwrap().unwrap().sale.epoch;
    assert!(current > E1 && ledger.finish_load(sale, current, next).await.unwrap());
    current
}

/// A process that has slept through a rebuild puts an order into quarantine that is there already: it keeps its mark and can be retried.
pub async fn order_stays_in_quarantine_after_a_rebuild(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    for id in [1, 2] {
        ledger.quarantine(&quarantined(sale, id, E1, "odd")).await.unwrap();
    }
    let current = rebuild(stores, sale).await;
    let put = async |id, error| ledger.quarantine(&quarantined(sale, id, E1, error)).await.unwrap();
    for id in [1, 2] {
        assert_eq!(put(id, "odd again").await, RecordOutcome::Quarantined);
        assert_eq!(ledger.order(order(id)).await.unwrap(), None);
    }
    // It also tries to record them, and a process that knows the current epoch does.
    for epoch in [E1, current] {
        let recorded = ledger.record(sale, epoch, &batch(&[(1, 1), (2, 2)])).await.unwrap();
        assert_eq!(recorded, [RecordOutcome::Quarantined; 2], "{epoch:?}");
    }
    let listed = ledger.quarantined(None, 10).await.unwrap();
    assert_eq!(listed, [quarantined(sale, 2, E1, "odd again"), quarantined(sale, 1, E1, "odd again")]);
    let of_another = QuarantinedOrder { admitted: admitted(1, 9), ..quarantined(sale, 1, E1, "odd") };
    assert_eq!(ledger.quarantine(&of_another).await.unwrap(), RecordOutcome::IdCollision, "an id of another user");
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().marks.len(), 2);

    assert_eq!(ledger.retry_quarantined(order(1)).await.unwrap(), Some(RecordOutcome::Inserted));
    assert_eq!(ledger.discard_quarantined(order(2)).await.unwrap(), DiscardOutcome::Done);
    let refused = RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None };
    assert_eq!(put(3, "odd").await, refused, "it was not in quarantine before the rebuild");
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), []);
    assert_eq!(check(stores, sale).await, 1);
}

/// A buyer cancels an order that is in quarantine, while the database rejects it: it stays dead whatever comes later, and its stock is free.
pub async fn quarantined_order_can_be_cancelled(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 1).await;
    ledger.quarantine(&quarantined(sale, 1, E1, "odd")).await.unwrap();
    assert_eq!(ledger.cancel(order(1), user(2), NOW).await.unwrap(), TransitionOutcome::NoSuchOrder, "another's");
    assert_eq!(ledger.cancel_for_operator(order(1), NOW).await.unwrap(), TransitionOutcome::NoSuchOrder);
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().marks, [(user(1), order(1))]);
    let current = rebuild(stores, sale).await;
    let later = NOW.plus(Duration::from_secs(1));
    let TransitionOutcome::Done(cancelled) = ledger.cancel(order(1), user(1), later).await.unwrap() else {
        panic!("it is not cancelled");
    };
    assert_eq!((cancelled.status, cancelled.created_at, cancelled.updated_at), (OrderStatus::Cancelled, NOW, later));
    assert_eq!((cancelled.sale, cancelled.price.cents()), (sale, 100));
    let again = ledger.cancel(order(1), user(1), later).await.unwrap();
    assert_eq!(again, TransitionOutcome::Repeated(cancelled));

    let releases = ledger.pending_releases(None, 10).await.unwrap();
    let releases: Vec<_> = releases.iter().map(|release| (release.order, release.user, release.ended)).collect();
    assert_eq!(releases, [(order(1), user(1), true)]);
    let steps: Vec<_> = ledger.order_history(order(1)).await.unwrap().iter().map(|step| (step.to, step.by)).collect();
    assert_eq!(steps, [(OrderStatus::Unpaid, Actor::System), (OrderStatus::Cancelled, Actor::Buyer)]);
    assert_eq!(ledger.quarantined(None, 10).await.unwrap(), []);
    assert_eq!(ledger.retry_quarantined(order(1)).await.unwrap(), None);
    assert_eq!(ledger.discard_quarantined(order(1)).await.unwrap(), DiscardOutcome::NoSuchOrder);

    // A consumer that has slept tries to record it, and to put it into quarantine.
    assert_eq!(record(stores, sale, &[(1, 1)]).await, [RecordOutcome::Dead]);
    assert_eq!(ledger.quarantine(&quarantined(sale, 1, E1, "odd")).await.unwrap(), RecordOutcome::Dead);
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().marks, []);
    assert_eq!(ledger.record(sale, current, &[admitted(2, 2)]).await.unwrap(), [RecordOutcome::Inserted]);
    assert_eq!(check(stores, sale).await, 1);
}

/// The epoch of a row tells when its order was admitted, like its time: `stampede check` compares the two.
pub async fn retried_order_keeps_the_epoch_of_its_admission(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    ledger.quarantine(&quarantined(sale, 1, E1, "odd")).await.unwrap();
    record(stores, sale, &[(2, 2)]).await;
    let current = rebuild(stores, sale).await;
    let later = Admitted { at: NOW.plus(Duration::from_secs(1)), ..admitted(3, 3) };
    assert_eq!(ledger.record(sale, current, &[later]).await.unwrap(), [RecordOutcome::Inserted]);

    assert_eq!(ledger.retry_quarantined(order(1)).await.unwrap(), Some(RecordOutcome::Inserted), "not an old write");
    let mut rows = ledger.inspect(sale).await.unwrap().unwrap().orders;
    rows.sort_unstable_by_key(|row| row.order.id);
    let epochs: Vec<(i64, Epoch, Timestamp)> =
        rows.iter().map(|row| (row.order.id.get(), row.epoch, row.order.created_at)).collect();
    assert_eq!(epochs, [(1, E1, NOW), (2, E1, NOW), (3, current, later.at)]);
    assert_eq!(check(stores, sale).await, 3);
}

/// The database has a trigger that ignores inserted orders: nothing counts as recorded, and nothing has changed.
pub async fn ignored_rows_are_an_outage(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 9).await;
    let is_outage = |error| matches!(error, ports::LedgerError::Unavailable(_));
    assert!(is_outage(ledger.record(sale, E1, &batch(&[(1, 1), (2, 2)])).await.unwrap_err()));
    assert!(is_outage(ledger.record(sale, Epoch(2), &batch(&[(3, 3)])).await.unwrap_err()), "a rejected order");
    ledger.quarantine(&quarantined(sale, 4, E1, "odd")).await.unwrap();
    assert!(is_outage(ledger.retry_quarantined(order(4)).await.unwrap_err()));
    assert!(is_outage(ledger.discard_quarantined(order(4)).await.unwrap_err()));
    assert_eq!(ledger.quarantined(None, 10).await.unwrap().len(), 1);
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().sale.sold, 0);
    assert_eq!(ledger.pending_releases(None, 10).await.unwrap(), []);
}
