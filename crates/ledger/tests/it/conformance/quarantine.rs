//! Orders that could not be recorded.

use stampede_core::ports::{DiscardOutcome, QuarantinedOrder};

use super::*;

fn quarantined(sale: SaleId, id: i64, epoch: Epoch, error: &str) -> QuarantinedOrder {
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

    // A late duplicate changes nothing and does not affect other orders.
    assert_eq!(record(stores, sale, &[(2, 2), (4, 4)]).await, [RecordOutcome::Quarantined, RecordOutcome::Inserted]);
    let refused = record(stores, sale, &[(2, 9)]).await;
    assert_eq!(refused, [RecordOutcome::IdCollision], "an id in quarantine is another's");

    assert_eq!(ledger.retry_quarantined(order(2)).await.unwrap(), Some(RecordOutcome::Inserted));
    assert_eq!(ledger.retry_quarantined(order(2)).await.unwrap(), None, "once");
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

/// The epoch of a row tells when its order was admitted, like its time: `stampede check` compares the two.
pub async fn retried_order_keeps_the_epoch_of_its_admission(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    ledger.quarantine(&quarantined(sale, 1, E1, "odd")).await.unwrap();
    record(stores, sale, &[(2, 2)]).await;
    let incarnation = ledger.gate_record("one").await.unwrap().incarnation;
    let next = ledger.begin_rebuild(incarnation, "r", NOW).await.unwrap().unwrap();
    let current = ledger.begin_load(sale, next).await.unwrap().unwrap().sale.epoch;
    assert!(current > E1 && ledger.finish_load(sale, current, next).await.unwrap());
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
