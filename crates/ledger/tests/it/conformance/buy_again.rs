//! Sales in which nobody may buy again.

use stampede_core::ports::{RecordOutcome, SaleDraft, Stores};
use stampede_core::*;

use super::{NOW, check, order, record, refused, sale_with, user};

pub async fn nobody_buys_again_where_that_is_forbidden(stores: &Stores) {
    let sale = sale_with(stores, |draft| SaleDraft { stock: 3, buy_again: false, ..draft }).await;
    let ledger = &stores.ledger;
    let inserted = RecordOutcome::Inserted;
    assert_eq!(record(stores, sale, &[(1, 1), (2, 2)]).await, [inserted, inserted]);
    ledger.cancel(order(1), user(1), NOW).await.unwrap();
    let bought_before = refused(RejectReason::BoughtBefore, None);
    assert_eq!(record(stores, sale, &[(3, 1), (4, 3)]).await, [bought_before, inserted]);
    assert_eq!(record(stores, sale, &[(3, 1)]).await, [RecordOutcome::Dead], "the rejection is final");
    // An order that was only rejected does not count.
    assert_eq!(record(stores, sale, &[(5, 4), (6, 5)]).await, [inserted, refused(RejectReason::SoldOut, None)]);
    ledger.cancel(order(2), user(2), NOW).await.unwrap();
    assert_eq!(record(stores, sale, &[(7, 5)]).await, [inserted]);
    check(stores, sale).await;

    let mut loaded = ledger.load(sale).await.unwrap().unwrap();
    loaded.ended.sort();
    assert_eq!(loaded.ended, [(user(1), order(1)), (user(2), order(2))]);
    let pending = ledger.pending_releases(None, 10).await.unwrap();
    assert!(pending.len() == 2 && pending.iter().all(|release| release.ended), "{pending:?}");
}
