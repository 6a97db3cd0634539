//! Payments that arrive after their orders have ended, and pay new ones.

use stampede_core::ports::PaymentOutcome;
use stampede_testkit::count;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
/// When the hold of a payment ends.
const HELD_UNTIL: Timestamp = Timestamp::from_ms(NOW.ms() + 30_000);

/// A sale in which user 1 has the cancelled order 1 and the unpaid order 2, and user 3 the unpaid order 3.
async fn bought_again(stores: &Stores) -> SaleId {
    let sale = sale_of(stores, 10).await;
    record(stores, sale, &[(1, 1)]).await;
    stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    assert_eq!(record(stores, sale, &[(2, 1), (3, 3)]).await, [RecordOutcome::Inserted; 2]);
    sale
}

/// Reports a payment that may be held.
async fn report(stores: &Stores, payment: &ReportedPayment) -> PaymentOutcome {
    stores.ledger.receive_payment(payment, NOW, Some(HELD_UNTIL)).await.unwrap()
}

/// Reports a payment for order 1, which is held.
async fn hold(stores: &Stores, transaction: &str) -> ReportedPayment {
    let reported = payment(transaction, 1, 100);
    let PaymentOutcome::Held(held, ended) = report(stores, &reported).await else { panic!("not held") };
    assert_eq!((held.status, held.reason), (PaymentStatus::RefundDue, Some(RefundReason::OrderEnded)));
    assert_eq!((ended.id, ended.status), (order(1), OrderStatus::Cancelled));
    reported
}

async fn moves(stores: &Stores, payment: &ReportedPayment, to: i64) -> bool {
    stores.ledger.move_payment(payment, order(to), NOW.plus(SECOND)).await.unwrap()
}

/// A payment as the ledger has it.
async fn known(stores: &Stores, transaction: &str) -> Payment {
    stores.ledger.payment("p", transaction).await.unwrap().unwrap()
}

async fn steps_of(stores: &Stores, id: i64) -> Vec<OrderStatus> {
    stores.ledger.order_history(order(id)).await.unwrap().iter().map(|step| step.to).collect()
}

pub async fn late_payments_are_moved_to_new_orders(stores: &Stores) {
    use OrderStatus::{Cancelled, Paid, Refunded, Refunding, Unpaid};
    let (sale, ledger) = (bought_again(stores).await, &stores.ledger);
    let reported = hold(stores, "a").await;
    assert_eq!(status(stores, 1).await, Cancelled, "it takes no step while the payment is held");
    assert_eq!(due_refunds(stores, HELD_UNTIL.minus(Duration::from_millis(1))).await, []);
    assert_eq!(report(stores, &reported).await, PaymentOutcome::StillHeld, "a repeated callback");

    assert!(moves(stores, &reported, 2).await);
    assert!(moves(stores, &reported, 2).await, "the same again");
    assert!(!moves(stores, &reported, 3).await);
    assert_eq!((status(stores, 1).await, status(stores, 2).await), (Cancelled, Paid));
    assert_eq!((steps_of(stores, 1).await, steps_of(stores, 2).await), (vec![Unpaid, Cancelled], vec![Unpaid, Paid]));
    let last = *ledger.order_history(order(2)).await.unwrap().last().unwrap();
    assert_eq!((last.reason, last.by, last.at), (Some(StepReason::Payment), Actor::Provider, NOW.plus(SECOND)));
    let moved = known(stores, "a").await;
    assert_eq!(
        (&moved.reported, moved.order, moved.status, moved.reason),
        (&reported, order(2), PaymentStatus::Paid, None)
    );
    assert_eq!(report(stores, &reported).await, PaymentOutcome::Repeated(moved.clone()), "a repeated callback");
    let reused = report(stores, &payment("a", 2, 100)).await;
    assert_eq!(reused, PaymentOutcome::TransactionReused(moved.clone()), "it was reported for the first one");
    for id in [1, 2] {
        assert_eq!(
            ledger.payments_of(order(id)).await.unwrap(),
            std::slice::from_ref(&moved),
            "{id}: it is shown with both"
        );
    }
    assert_eq!(ledger.inspect(sale).await.unwrap().unwrap().payments, std::slice::from_ref(&moved));
    let far = NOW.plus(1000 * SECOND);
    assert!(!ledger.end_hold(&reported, far).await.unwrap());
    assert!(!ledger.complete_refund(&reported, far).await.unwrap(), "it has paid");
    assert_eq!(due_refunds(stores, far).await, []);
    assert_eq!(check(stores, sale).await, 2);

    // An operator refunds the new order: the payment is returned, and the first order stays as it is.
    assert!(matches!(ledger.refund(order(2), far).await.unwrap(), TransitionOutcome::Done(_)));
    let [attempt] = due_refunds(stores, far).await.try_into().unwrap();
    assert_eq!((attempt.payment.order, &attempt.payment.reported, attempt.held), (order(2), &reported, false));
    assert!(ledger.begin_refund(&attempt, far).await.unwrap());
    assert!(ledger.complete_refund(&reported, far).await.unwrap());
    assert_eq!((status(stores, 1).await, status(stores, 2).await), (Cancelled, Refunded));
    assert_eq!(steps_of(stores, 2).await, [Unpaid, Paid, Refunding, Refunded]);
    assert!(moves(stores, &reported, 2).await, "a repeated move changes nothing");
    assert_eq!(known(stores, "a").await.status, PaymentStatus::Refunded);
}

pub async fn payments_are_moved_only_to_orders_that_they_fit(stores: &Stores) {
    use OrderStatus::{Cancelled, Paid, Unpaid};
    let (sale, ledger) = (bought_again(stores).await, &stores.ledger);
    let other = own_orders::another_sale(stores, 1).await;
    record(stores, other, &[(10, 1)]).await;

    // Only the price of an order that was cancelled is held.
    for (transaction, id, amount) in [("unknown", 404, 100), ("wrong", 3, 99), ("early", 3, 100), ("second", 3, 100)] {
        let outcome = report(stores, &payment(transaction, id, amount)).await;
        assert!(matches!(outcome, PaymentOutcome::Received(_)), "{outcome:?}");
        assert!(!moves(stores, &payment(transaction, id, amount), 2).await, "{transaction}");
    }
    record(stores, sale, &[(4, 4)]).await;
    ledger.cancel(order(4), user(4), NOW).await.unwrap();
    let outcome = report(stores, &payment("less", 4, 99)).await;
    assert!(matches!(outcome, PaymentOutcome::Received(_)), "{outcome:?}");
    assert_eq!(status(stores, 4).await, OrderStatus::Refunding);
    let outcome = report(stores, &payment("again", 4, 100)).await;
    assert!(matches!(outcome, PaymentOutcome::Received(_)), "its money is being returned: {outcome:?}");

    let reported = hold(stores, "a").await;
    record(stores, sale, &[(5, 5)]).await;
    for (to, why) in [
        (404, "there is no such order"),
        (1, "it has ended"),
        (3, "it is another buyer's, and paid"),
        (5, "it is another buyer's"),
        (10, "it is in another sale"),
    ] {
        assert!(!moves(stores, &reported, to).await, "{why}");
    }
    for (changed, why) in [
        (ReportedPayment { provider: "q".into(), ..reported.clone() }, "there is no such payment"),
        (payment("b", 1, 100), "there is no such payment"),
        (payment("a", 4, 100), "it was reported for another order"),
        (payment("a", 1, 99), "it has another amount"),
    ] {
        assert!(!moves(stores, &changed, 2).await, "{why}");
    }
    assert_eq!((status(stores, 2).await, status(stores, 5).await, status(stores, 10).await), (Unpaid, Unpaid, Unpaid));

    // A second payment pays the order first.
    assert!(matches!(report(stores, &payment("direct", 2, 100)).await, PaymentOutcome::Received(_)));
    assert!(!moves(stores, &reported, 2).await, "it is paid");
    assert_eq!((status(stores, 1).await, status(stores, 2).await), (Cancelled, Paid));
    assert!(ledger.end_hold(&reported, NOW).await.unwrap());
    assert_eq!(check(stores, sale).await, 3);
}

pub async fn held_payments_that_are_not_moved_are_returned(stores: &Stores) {
    use OrderStatus::{Cancelled, Refunded, Refunding, Unpaid};
    let (sale, ledger) = (bought_again(stores).await, &stores.ledger);
    let first = hold(stores, "a").await;
    let [attempt] = due_refunds(stores, HELD_UNTIL).await.try_into().unwrap();
    assert_eq!((attempt.held, attempt.due_at), (true, Some(HELD_UNTIL)));
    assert!(!ledger.begin_refund(&attempt, HELD_UNTIL).await.unwrap(), "it may still be moved");
    assert!(ledger.end_hold(&first, NOW).await.unwrap());
    assert!(!ledger.end_hold(&first, NOW).await.unwrap(), "once");
    assert!(!moves(stores, &first, 2).await, "its hold is over");
    assert_eq!(status(stores, 1).await, Refunding);
    let [attempt] = due_refunds(stores, NOW).await.try_into().unwrap();
    assert_eq!((attempt.held, attempt.due_at, attempt.tries), (false, Some(NOW), 0));
    assert!(ledger.begin_refund(&attempt, NOW.plus(SECOND)).await.unwrap());
    assert!(!moves(stores, &first, 2).await);
    // An attempt that is counted from the first again lets nothing be moved.
    assert!(ledger.retry_refund("p", "a", NOW).await.unwrap());
    assert!(!moves(stores, &first, 2).await);
    assert!(ledger.complete_refund(&first, NOW).await.unwrap());
    assert_eq!(steps_of(stores, 1).await, [Unpaid, Cancelled, Refunding, Refunded]);
    let late = ledger.order_history(order(1)).await.unwrap()[2];
    assert_eq!((late.reason, late.by), (Some(StepReason::LatePayment), Actor::Provider));

    // An operator has one returned at once, or has returned it by hand.
    record(stores, sale, &[(11, 11), (12, 12), (13, 13)]).await;
    let held = async |id: i64, transaction: &str| {
        let reported = payment(transaction, id, 100);
        let outcome = report(stores, &reported).await;
        assert!(matches!(outcome, PaymentOutcome::Held(..)), "{outcome:?}");
        reported
    };
    for id in [11, 12, 13] {
        ledger.cancel(order(id), user(id), NOW).await.unwrap();
    }
    held(11, "retried").await;
    assert!(ledger.retry_refund("p", "retried", NOW).await.unwrap());
    assert_eq!(status(stores, 11).await, Refunding);
    let attempts = due_refunds(stores, NOW).await;
    assert!(attempts.iter().any(|attempt| attempt.payment.order == order(11) && !attempt.held), "{attempts:?}");
    let by_hand = held(12, "by hand").await;
    assert!(ledger.complete_refund(&by_hand, NOW).await.unwrap());
    assert_eq!(steps_of(stores, 12).await, [Unpaid, Cancelled, Refunding, Refunded]);
    assert!(!moves(stores, &by_hand, 2).await);

    // Of two payments for one order, the one that is returned ends the order, and the other one may still be moved.
    let (returned, moved) = (held(13, "returned").await, held(13, "moved").await);
    assert!(ledger.end_hold(&returned, NOW).await.unwrap());
    assert!(ledger.complete_refund(&returned, NOW).await.unwrap());
    assert_eq!(status(stores, 13).await, Refunded);
    record(stores, sale, &[(14, 13)]).await;
    assert!(moves(stores, &moved, 14).await);
    assert_eq!((status(stores, 13).await, status(stores, 14).await), (Refunded, OrderStatus::Paid));

    // An order that was made for a payment which is returned is cancelled by Stampede itself.
    let TransitionOutcome::Done(unused) = ledger.cancel_readmitted(order(2), NOW).await.unwrap() else {
        panic!("not cancelled")
    };
    assert_eq!((unused.id, unused.status), (order(2), Cancelled));
    let last = *ledger.order_history(order(2)).await.unwrap().last().unwrap();
    assert_eq!((last.reason, last.by), (Some(StepReason::PaymentReturned), Actor::System));
    assert_eq!(ledger.cancel_readmitted(order(2), NOW).await.unwrap(), TransitionOutcome::Repeated(unused));
    let paid = ledger.cancel_readmitted(order(14), NOW).await.unwrap();
    assert_eq!(paid, TransitionOutcome::Illegal(OrderStatus::Paid));
    assert_eq!(ledger.cancel_readmitted(order(404), NOW).await.unwrap(), TransitionOutcome::NoSuchOrder);
    assert!(ledger.pending_releases(None, 100).await.unwrap().iter().any(|release| release.order == order(2)));
    assert_eq!(check(stores, sale).await, 2);
}

/// What may happen to a payment that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contender {
    Move,
    /// The hold ends, and an attempt to return the payment begins.
    Return,
    /// An operator has returned it by hand.
    Complete,
}

/// Each payment is moved twice, returned, and returned by hand at the same moment, and its new order is cancelled by its buyer in some rounds:
/// the payment has paid one order, or was returned, and never both.
pub async fn moving_and_returning_have_one_winner(stores: &Stores) {
    let rounds = i64::try_from(count(10_000, 60)).unwrap();
    let sale = sale_of(stores, u32::try_from(rounds).unwrap()).await;
    let mut paid = 0;
    for round in 1..=rounds {
        let (old, new) = (2 * round, 2 * round + 1);
        record(stores, sale, &[(old, round)]).await;
        stores.ledger.cancel(order(old), user(round), NOW).await.unwrap();
        let reported = payment(&format!("t{round}"), old, 100);
        report(stores, &reported).await;
        record(stores, sale, &[(new, round)]).await;
        let contenders = [Contender::Move, Contender::Return, Contender::Complete, Contender::Move];
        let first = usize::try_from(round).unwrap() % contenders.len();
        let tasks: Vec<_> = (0..contenders.len())
            .map(|n| {
                let (ledger, reported) = (stores.ledger.clone(), reported.clone());
                let contender = contenders[(first + n) % contenders.len()];
                tokio::spawn(async move {
                    let has_won = match contender {
                        Contender::Move => ledger.move_payment(&reported, order(new), NOW).await.unwrap(),
                        Contender::Return => {
                            ledger.end_hold(&reported, NOW).await.unwrap();
                            let attempts = ledger.due_refunds(NOW, 1000).await.unwrap();
                            let mine = attempts.iter().find(|attempt| attempt.payment.reported == reported);
                            let attempt = mine.filter(|attempt| !attempt.held);
                            match attempt {
                                Some(attempt) => ledger.begin_refund(attempt, NOW.plus(SECOND)).await.unwrap(),
                                None => false,
                            }
                        }
                        Contender::Complete => ledger.complete_refund(&reported, NOW).await.unwrap(),
                    };
                    (contender, has_won)
                })
            })
            .collect();
        let cancelling = (round % 3 == 0).then(|| {
            let ledger = stores.ledger.clone();
            tokio::spawn(async move { ledger.cancel(order(new), user(round), NOW).await.unwrap() })
        });
        let mut won = Vec::new();
        for task in tasks {
            let (contender, has_won) = task.await.unwrap();
            won.extend(has_won.then_some(contender));
        }
        let is_cancelled = match cancelling {
            Some(task) => matches!(task.await.unwrap(), TransitionOutcome::Done(_)),
            None => false,
        };
        let is_moved = won.contains(&Contender::Move);
        assert!(!is_moved || won.iter().all(|contender| *contender == Contender::Move), "{round}: {won:?}");
        assert!(!(is_moved && is_cancelled), "{round}: a cancelled order was paid");
        assert!(is_moved || won.contains(&Contender::Complete), "{round}: {won:?}");
        let payment = known(stores, &format!("t{round}")).await;
        let (old, new) = (status(stores, old).await, status(stores, new).await);
        if is_moved {
            assert_eq!((payment.status, old, new), (PaymentStatus::Paid, OrderStatus::Cancelled, OrderStatus::Paid));
            paid += 1;
        } else {
            let unpaid = if is_cancelled { OrderStatus::Cancelled } else { OrderStatus::Unpaid };
            assert_eq!((payment.status, old, new), (PaymentStatus::Refunded, OrderStatus::Refunded, unpaid));
            stores.ledger.cancel_readmitted(order(2 * round + 1), NOW).await.unwrap();
        }
    }
    assert_eq!(check(stores, sale).await, paid, "the others' orders are cancelled");
}

pub async fn steps_of_moved_payments_are_written_into_the_outbox(stores: &Stores) {
    let ledger = &stores.ledger;
    bought_again(stores).await;
    let reported = hold(stores, "a").await;
    assert!(moves(stores, &reported, 2).await);
    assert!(moves(stores, &reported, 2).await);
    let second = hold(stores, "b").await;
    ledger.complete_refund(&second, NOW).await.unwrap();
    let entries = ledger.due_events(NOW, 100).await.unwrap();
    let steps: Vec<_> =
        entries.iter().flat_map(|entry| &entry.events).map(|event| (event.order.get(), event.step.to)).collect();
    use OrderStatus::{Cancelled, Paid, Refunded, Refunding, Unpaid};
    let expected = [(1, Unpaid), (1, Cancelled), (2, Unpaid), (3, Unpaid), (2, Paid), (1, Refunding), (1, Refunded)];
    assert_eq!(steps, expected);
}
