//! What reconciling writes.

use std::time::Duration;

use stampede_core::ports::{Fence, Fenced, ReconcileRow, ScheduledWork, Stores};

use super::{NOW, order, record, sale_of};

pub async fn reconcile_log_is_read_in_pages(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 1).await;
    let row = |n: i64| ReconcileRow {
        id: 0,
        at: NOW,
        sale,
        order: (n % 2 == 0).then(|| order(n)),
        finding: "dead_row_with_mark".into(),
        detail: "茶".repeat(400) + &"x".repeat(2000),
        outcome: "repaired".into(),
    };
    let fence = |token| Some(Fence { work: ScheduledWork::Reconcile, token });
    assert_eq!(ledger.append_reconciled(fence(2), &[row(1), row(2), row(3)]).await.unwrap(), Fenced::Done(()));
    assert_eq!(ledger.append_reconciled(fence(1), &[row(4)]).await.unwrap(), Fenced::Superseded);
    assert_eq!(ledger.append_reconciled(None, &[row(4)]).await.unwrap(), Fenced::Done(()));
    let first = ledger.reconciled(None, 3).await.unwrap();
    assert_eq!(first.iter().map(|row| row.order).collect::<Vec<_>>(), [Some(order(4)), None, Some(order(2))]);
    let rest = ledger.reconciled(Some(first[2].id), 3).await.unwrap();
    assert_eq!(rest.len(), 1);
    assert_eq!((rest[0].at, rest[0].sale, rest[0].detail.chars().count()), (NOW, sale, 1000));
    // Old lines are deleted when new ones are written.
    let later = ReconcileRow { at: NOW.plus(Duration::from_secs(91 * 24 * 3600)), ..row(5) };
    ledger.append_reconciled(None, &[later]).await.unwrap();
    assert_eq!(ledger.reconciled(None, 10).await.unwrap().len(), 1);
}

pub async fn cap_of_the_gate_is_adopted_once(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 10).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    let version = ledger.sale(sale).await.unwrap().unwrap().version;
    let adopt = async |version, cap| ledger.adopt_cap(sale, version, cap, NOW).await.unwrap();
    let state = async || {
        let sale = ledger.sale(sale).await.unwrap().unwrap();
        (sale.cap, sale.total, sale.sold, sale.version)
    };
    assert_eq!(adopt(version + 1, 5).await, None, "another version");
    assert_eq!(adopt(version, 11).await, None, "the total never rises");
    assert_eq!(state().await, (10, 10, 2, version));
    assert_eq!(adopt(version, 5).await, Some(5));
    assert_eq!(adopt(version, 5).await, Some(5), "again");
    assert_eq!(state().await, (5, 5, 2, version));
    assert_eq!(adopt(version, 1).await, Some(2), "not below what is sold");
    assert_eq!(state().await, (2, 2, 2, version));
    let changes = ledger.inspect(sale).await.unwrap().unwrap().stock_changes;
    let mut removed: Vec<_> = changes.iter().map(|change| (change.added, change.is_edit)).collect();
    removed.sort_unstable();
    assert_eq!(removed, [(-5, false), (-3, false)]);
    assert!(ledger.raise_version(sale, version).await.unwrap());
    assert!(!ledger.raise_version(sale, version).await.unwrap());
    assert_eq!(ledger.sale(sale).await.unwrap().unwrap().version, version + 1);
}

pub async fn alerts_are_claimed_once(stores: &Stores) {
    let hour = Duration::from_secs(3600);
    let claim = |case: &'static str, at| {
        let ledger = stores.ledger.clone();
        async move { ledger.claim_alert(case, at, hour).await.unwrap() }
    };
    let (one, other) = tokio::join!(claim("a", NOW), claim("a", NOW));
    assert!(one ^ other, "one of two nodes tells");
    assert!(claim("b", NOW).await, "another case");
    assert!(!claim("a", NOW.plus(hour / 2)).await);
    assert!(claim("a", NOW.plus(hour)).await, "still so after an hour");
    assert!(!claim("a", NOW.plus(hour)).await);
    for _ in 0..2 {
        stores.ledger.clear_alert("a").await.unwrap();
    }
    assert!(!claim("b", NOW).await, "another case goes on");
    assert!(claim("a", NOW.plus(hour)).await, "it had ended");
    assert!(!claim("a", NOW.plus(hour)).await);
}
