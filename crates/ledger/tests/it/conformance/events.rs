//! The steps of orders.

use super::*;

fn step(from: OrderStatus, to: OrderStatus, at: Timestamp, reason: Option<StepReason>, by: Actor) -> OrderEvent {
    OrderEvent { from, to, at, reason, by }
}

pub async fn steps_of_orders_are_kept(stores: &Stores) {
    use OrderStatus::{Cancelled, Pending, Rejected, Unpaid};
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 2).await;
    record(stores, sale, &[(1, 1), (2, 2), (3, 3)]).await;
    let later = NOW.plus(Duration::from_secs(1));
    for _twice in 0..2 {
        ledger.cancel(order(1), user(1), later).await.unwrap();
    }
    let recorded = step(Pending, Unpaid, NOW, None, Actor::System);
    let cancelled = step(Unpaid, Cancelled, later, Some(StepReason::Requested), Actor::Buyer);
    let rejected = step(Pending, Rejected, NOW, Some(StepReason::SoldOut), Actor::System);
    for (id, expected) in [(1, vec![recorded, cancelled]), (2, vec![recorded]), (3, vec![rejected]), (4, Vec::new())] {
        assert_eq!(ledger.order_history(order(id)).await.unwrap(), expected, "order {id}");
    }
    let other = own_orders::another_sale(stores, 1).await;
    record(stores, other, &[(5, 5)]).await;
    ledger.cancel(order(5), user(5), later).await.unwrap();
    let records = ledger.inspect(sale).await.unwrap().unwrap();
    assert_eq!(records.events, [(order(1), cancelled)], "those of this sale");
    let reasons: Vec<_> = records.orders.iter().map(|row| row.reason).collect();
    assert_eq!(reasons, [Some(StepReason::Requested), None, Some(StepReason::SoldOut)]);
}
