//! The orders of a user: cancelling and listing.

use super::*;

/// A sale of another voucher in the shop of [`sale_of`].
pub(super) async fn another_sale(stores: &Stores, n: i64) -> SaleId {
    another_sale_with_deadline(stores, n, 0).await
}

pub async fn another_sale_with_deadline(stores: &Stores, n: i64, payment_deadline_ms: u32) -> SaleId {
    let first = stores.catalogue.voucher(VoucherId::new(7).unwrap()).await.unwrap().unwrap();
    let voucher = Voucher { id: VoucherId::new(100 + n).unwrap(), ..first };
    assert_eq!(stores.catalogue.create_voucher(&voucher).await.unwrap(), CreateOutcome::Created);
    let sale = SaleId::new(100 + n).unwrap();
    let draft = SaleDraft { payment_deadline_ms, ..draft(sale, voucher.id, 100) };
    assert_eq!(stores.ledger.create_sale(draft, NOW).await.unwrap(), CreateOutcome::Created);
    sale
}

pub async fn cancellation_is_never_older_than_its_order(stores: &Stores) {
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1)]).await;
    let made = stores.ledger.order(order(1)).await.unwrap().unwrap();
    let earlier = made.created_at.minus(Duration::from_secs(3600));
    let TransitionOutcome::Done(cancelled) = stores.ledger.cancel(order(1), user(1), earlier).await.unwrap() else {
        panic!("not cancelled")
    };
    assert_eq!(cancelled.updated_at, made.created_at);
    assert_eq!(stores.ledger.order(order(1)).await.unwrap(), Some(cancelled.clone()));
    let again = stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    assert_eq!(again, TransitionOutcome::Repeated(cancelled), "cancelled once, answered alike");
    assert_eq!(stores.ledger.pending_releases(None, 10).await.unwrap().len(), 1);
}

pub async fn orders_of_old_sales_are_listed_from_the_index(stores: &Stores) {
    let ledger = &stores.ledger;
    let mut sales = Vec::new();
    for n in 0..3 {
        let sale = if n == 0 { sale_of(stores, 100).await } else { another_sale(stores, n).await };
        for m in 0..7 {
            record(stores, sale, &[(100 * n + m + 1, m % 4 + 1)]).await;
            ledger.cancel(order(100 * n + m + 1), user(m % 4 + 1), NOW).await.unwrap();
        }
        sales.push(sale);
    }
    let list = async |n: i64| {
        let orders = ledger.orders_of(user(n), None, 100).await.unwrap();
        orders.iter().map(|order| order.id.get()).collect::<Vec<_>>()
    };
    let expected = |n: i64| {
        let ids = (0..3).flat_map(|sale| (0..7).map(move |m| (sale, m))).filter(|(_, m)| m % 4 + 1 == n);
        let mut ids: Vec<i64> = ids.map(|(sale, m)| 100 * sale + m + 1).collect();
        ids.reverse();
        ids
    };
    let index =
        async |before, limit| ledger.index_orders(None, before, limit).await.unwrap().done().expect("it is not fenced");
    assert!(!index(NOW.minus(Duration::from_secs(7 * 86_400)), 3).await, "none is over");
    // Steps may be smaller than the number of a user's orders; between any two of them the list is complete.
    let over = ledger.sale(sales[2]).await.unwrap().unwrap().window.end.plus(Duration::from_millis(1));
    let mut steps = 0;
    while index(over, 1 + steps % 3).await {
        steps += 1;
        assert!(steps < 100, "it comes to an end");
        for n in 1..=4 {
            assert_eq!(list(n).await, expected(n), "user {n} after step {steps}");
        }
    }
    assert!(steps >= 6, "{steps}");
    // Orders that are recorded afterwards are found as well.
    assert_eq!(record(stores, sales[1], &[(500, 1), (501, 9)]).await, [RecordOutcome::Inserted; 2]);
    assert_eq!(list(9).await, [501]);
    assert_eq!(list(1).await.first(), Some(&500));
    assert_eq!(check(stores, sales[1]).await, 2);
}

/// Once all orders of a sale that is over are in the index, only the index is read. `execute` runs a statement in the database.
pub async fn old_orders_are_listed_from_the_index_alone(stores: &Stores, execute: impl AsyncFnOnce(&'static str)) {
    let (ledger, sale) = (&stores.ledger, sale_of(stores, 5).await);
    for n in 1..=3 {
        record(stores, sale, &[(n, 1)]).await;
        ledger.cancel(order(n), user(1), NOW).await.unwrap();
    }
    let over = ledger.sale(sale).await.unwrap().unwrap().window.end.plus(Duration::from_millis(1));
    while ledger.index_orders(None, over, 10).await.unwrap().done().expect("it is not fenced") {}
    execute("DELETE FROM orders_by_user WHERE order_id = 2").await;
    let listed = ledger.orders_of(user(1), None, 100).await.unwrap();
    assert_eq!(listed.iter().map(|order| order.id.get()).collect::<Vec<_>>(), [3, 1]);
}

pub async fn orders_are_listed_newest_first(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    for n in 1..=4 {
        record(stores, sale, &[(n, 1)]).await;
        stores.ledger.cancel(order(n), user(1), NOW).await.unwrap();
    }
    record(stores, sale, &[(5, 1), (6, 2), (7, 1)]).await;
    let ids = |orders: Vec<Order>| orders.iter().map(|order| order.id.get()).collect::<Vec<_>>();
    let list = |before, limit| stores.ledger.orders_of(user(1), before, limit);
    assert_eq!(ids(list(None, 3).await.unwrap()), [5, 4, 3], "a rejected try is not an order of mine");
    assert_eq!(ids(list(Some(order(3)), 3).await.unwrap()), [2, 1]);
}
