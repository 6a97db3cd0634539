//! The outbox of events: what is written into it, and what becomes of it.

use std::collections::BTreeMap;

use stampede_core::ports::{EventDelivery, HeldEvent, OutboxEntry, QuarantinedOrder, RejectedEvent};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

async fn due(stores: &Stores, at: Timestamp) -> Vec<OutboxEntry> {
    stores.ledger.due_events(at, 1000).await.unwrap()
}

/// The orders of each entry, with the statuses that they have reached.
fn steps(entries: &[OutboxEntry]) -> Vec<Vec<(i64, OrderStatus)>> {
    let of_entry = |entry: &OutboxEntry| entry.events.iter().map(|event| (event.order.get(), event.step.to)).collect();
    entries.iter().map(of_entry).collect()
}

pub async fn no_events_are_written_unless_configured(stores: &Stores) {
    let sale = sale_of(stores, 2).await;
    record(stores, sale, &[(1, 1)]).await;
    record(stores, sale, &[(1, 1), (2, 2), (3, 3)]).await;
    stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    assert_eq!(due(stores, NOW).await, []);
    assert_eq!(stores.ledger.count_events().await.unwrap(), 0);
}

/// On the fast path and on the slow one, and by everything that makes an order take a step.
pub async fn every_step_is_written_into_the_outbox(stores: &Stores) {
    use OrderStatus::{Cancelled, Paid, Redeemed, Refunded, Refunding, Rejected, Unpaid};
    let ledger = &stores.ledger;
    let sale = sale_with_deadline(stores, 4, 60_000).await;
    record(stores, sale, &[(4, 2), (1, 1), (5, 5)]).await;
    record(stores, sale, &[(2, 3), (3, 4)]).await;
    assert_eq!(record(stores, sale, &[(1, 1), (2, 3)]).await, [RecordOutcome::AlreadyRecorded; 2], "written once");
    let quarantined =
        QuarantinedOrder { sale, epoch: E1, admitted: admitted(6, 6), error: "x".into(), quarantined_at: NOW };
    ledger.quarantine(&quarantined).await.unwrap();
    ledger.discard_quarantined(order(6)).await.unwrap();
    let payment = |id| ReportedPayment {
        provider: "p".into(),
        transaction: format!("t{id}"),
        order: order(id),
        amount_cents: 100,
    };
    for id in [1, 5] {
        ledger.receive_payment(&payment(id), NOW, None).await.unwrap();
    }
    ledger.refund(order(1), NOW).await.unwrap();
    assert!(ledger.complete_refund(&payment(1), NOW).await.unwrap());
    for _twice in 0..2 {
        ledger.cancel(order(2), user(3), NOW).await.unwrap();
        ledger.redeem(order(5), NOW).await.unwrap();
    }
    assert_eq!(ledger.expire_orders(NOW.plus(60 * SECOND), 10, &[]).await.unwrap().orders, 1);

    let entries = due(stores, NOW).await;
    let expected: Vec<Vec<(i64, OrderStatus)>> = vec![
        vec![(1, Unpaid), (4, Unpaid), (5, Unpaid)],
        vec![(2, Unpaid), (3, Rejected)],
        vec![(6, Rejected)],
        vec![(1, Paid)],
        vec![(5, Paid)],
        vec![(1, Refunding)],
        vec![(1, Refunded)],
        vec![(2, Cancelled)],
        vec![(5, Redeemed)],
        vec![(4, Cancelled)],
    ];
    assert_eq!(steps(&entries), expected);
    assert!(entries.is_sorted_by_key(|entry| entry.id));
    assert!(entries.iter().all(|entry| entry.tries == 0 && entry.error.is_none()));
    assert_eq!(entries.iter().map(|entry| entry.is_batch).collect::<Vec<_>>()[..4], [true, true, true, false]);
    let mut histories: BTreeMap<OrderId, Vec<OrderEvent>> = BTreeMap::new();
    for event in entries.iter().flat_map(|entry| &entry.events) {
        let row = ledger.order(event.order).await.unwrap().unwrap();
        assert_eq!((event.sale, event.user), (sale, row.user));
        histories.entry(event.order).or_default().push(event.step);
    }
    for (id, history) in histories {
        assert_eq!(history, ledger.order_history(id).await.unwrap(), "{id}");
    }
    assert_eq!(ledger.count_events().await.unwrap(), 10);
    assert_eq!(steps(&ledger.due_events(NOW, 2).await.unwrap()), expected[..2]);
}

/// Records a batch of three orders, of which the first is cancelled. Returns both entries.
async fn batch_and_step(stores: &Stores) -> (OutboxEntry, OutboxEntry) {
    let sale = sale_of(stores, 5).await;
    record(stores, sale, &[(1, 1), (2, 2), (3, 3)]).await;
    stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    let [batch, cancelled] = <[OutboxEntry; 2]>::try_from(due(stores, NOW).await).unwrap();
    (batch, cancelled)
}

/// The second order of the batch was accepted, and the first one rejected.
fn first_is_rejected(batch: &OutboxEntry) -> EventDelivery {
    let rejected = RejectedEvent {
        entry: batch.id,
        from_batch: true,
        event: batch.events[0],
        tries: 1,
        next_at: Some(NOW.plus(SECOND)),
        error: "it's no good".into(),
    };
    EventDelivery { left: vec![(batch.id, vec![order(3)])], rejected: vec![rejected], ..EventDelivery::default() }
}

/// The entry of the recording of the first order, which was rejected.
async fn entry_of_rejected(stores: &Stores) -> i64 {
    let waiting = stores.ledger.waiting_steps(&[order(1), order(2)]).await.unwrap();
    assert!(waiting.iter().all(|step| step.order == order(1)), "{waiting:?}");
    waiting.iter().find(|step| step.to == OrderStatus::Unpaid).unwrap().entry
}

pub async fn outbox_keeps_what_is_not_delivered(stores: &Stores) {
    use OrderStatus::{Cancelled, Unpaid};
    let ledger = &stores.ledger;
    let (batch, cancelled) = batch_and_step(stores).await;
    let delivery = first_is_rejected(&batch);
    // Two processes have sent the same.
    for _twice in 0..2 {
        ledger.finish_events(&delivery).await.unwrap();
    }
    assert_eq!(steps(&due(stores, NOW).await), [[(3, Unpaid)], [(1, Cancelled)]]);
    let earlier = entry_of_rejected(stores).await;
    let held = HeldEvent { entry: cancelled.id, earlier, until: NOW };
    ledger.finish_events(&EventDelivery { held: vec![held], ..EventDelivery::default() }).await.unwrap();
    assert_eq!(steps(&due(stores, NOW).await), [[(3, Unpaid)]], "it waits as long as the earlier one");
    let later = due(stores, NOW.plus(SECOND)).await;
    assert_eq!(steps(&later), [[(3, Unpaid)], [(1, Cancelled)], [(1, Unpaid)]]);
    let rejected = &later[2];
    assert_eq!((rejected.is_batch, rejected.tries), (false, 1));
    assert_eq!((rejected.error.as_deref(), rejected.events[0]), (Some("it's no good"), batch.events[0]));

    let done = EventDelivery { done: vec![batch.id], ..EventDelivery::default() };
    ledger.finish_events(&done).await.unwrap();
    let rest = EventDelivery { done: vec![earlier, cancelled.id], ..EventDelivery::default() };
    ledger.finish_events(&rest).await.unwrap();
    // A process that was paused brings nothing back.
    ledger.finish_events(&delivery).await.unwrap();
    ledger.finish_events(&EventDelivery { held: vec![held], ..EventDelivery::default() }).await.unwrap();
    assert_eq!(ledger.count_events().await.unwrap(), 0);
}

pub async fn rejected_events_are_set_aside_until_they_are_retried(stores: &Stores) {
    use OrderStatus::{Cancelled, Unpaid};
    let ledger = &stores.ledger;
    let (batch, cancelled) = batch_and_step(stores).await;
    ledger.finish_events(&first_is_rejected(&batch)).await.unwrap();
    let earlier = entry_of_rejected(stores).await;
    let rejected = RejectedEvent {
        entry: earlier,
        from_batch: false,
        event: batch.events[0],
        tries: 10,
        next_at: None,
        error: "it returned 422".repeat(100),
    };
    let held = HeldEvent { entry: cancelled.id, earlier, until: NOW };
    let delivery = EventDelivery { rejected: vec![rejected], held: vec![held], ..EventDelivery::default() };
    ledger.finish_events(&delivery).await.unwrap();
    let late = NOW.plus(3600 * SECOND);
    assert_eq!(steps(&due(stores, late).await), [[(3, Unpaid)]]);
    let failed = ledger.failed_events(10).await.unwrap();
    assert_eq!(steps(&failed), [[(1, Cancelled)], [(1, Unpaid)]]);
    assert_eq!(failed.iter().map(|entry| (entry.tries, entry.next_at)).collect::<Vec<_>>(), [(0, None), (10, None)]);
    assert!(failed.iter().all(|entry| entry.error.is_some()));
    assert_eq!(ledger.failed_events(1).await.unwrap().len(), 1);

    assert_eq!(ledger.retry_events(Some(order(2))).await.unwrap(), 0);
    assert_eq!(ledger.retry_events(Some(order(1))).await.unwrap(), 2);
    assert_eq!(ledger.retry_events(None).await.unwrap(), 0);
    assert_eq!(steps(&due(stores, NOW).await), [[(3, Unpaid)], [(1, Cancelled)], [(1, Unpaid)]]);
    assert!(due(stores, NOW).await.iter().all(|entry| entry.tries == 0));
    assert_eq!(ledger.failed_events(10).await.unwrap(), []);
}
