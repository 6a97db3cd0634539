//! Payments of orders.

use stampede_core::ports::{MAX_REDEEM_TRIES, PaymentOutcome};
use stampede_testkit::count;

use super::*;

pub fn payment(transaction: &str, id: i64, amount_cents: i64) -> ReportedPayment {
    ReportedPayment { provider: "p".into(), transaction: transaction.into(), order: order(id), amount_cents }
}

async fn pay(stores: &Stores, payment: &ReportedPayment) -> PaymentOutcome {
    stores.ledger.receive_payment(payment, NOW.plus(Duration::from_secs(1)), None).await.unwrap()
}

#[track_caller]
fn received(outcome: PaymentOutcome) -> (PaymentStatus, Option<RefundReason>) {
    let PaymentOutcome::Received(payment) = outcome else { panic!("{outcome:?}") };
    (payment.status, payment.reason)
}

pub async fn status(stores: &Stores, id: i64) -> OrderStatus {
    stores.ledger.order(order(id)).await.unwrap().unwrap().status
}

pub async fn orders_are_paid_once(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    let first = payment("a", 1, 100);
    assert_eq!(received(pay(stores, &first).await), (PaymentStatus::Paid, None));
    let repeated = pay(stores, &first).await;
    let PaymentOutcome::Repeated(known) = repeated else { panic!("{repeated:?}") };
    assert_eq!((known.status, &known.reported), (PaymentStatus::Paid, &first));
    assert_eq!(status(stores, 1).await, OrderStatus::Paid);
    for reused in [payment("a", 2, 100), payment("a", 1, 99)] {
        let outcome = pay(stores, &reused).await;
        assert_eq!(outcome, PaymentOutcome::TransactionReused(known.clone()));
    }
    assert_eq!(status(stores, 2).await, OrderStatus::Unpaid);
    let other_provider = ReportedPayment { provider: "q".into(), ..payment("a", 2, 100) };
    assert_eq!(received(pay(stores, &other_provider).await), (PaymentStatus::Paid, None), "ids are the provider's");
    let steps = stores.ledger.order_history(order(1)).await.unwrap();
    let last = steps.last().unwrap();
    assert_eq!((last.to, last.reason, last.by), (OrderStatus::Paid, Some(StepReason::Payment), Actor::Provider));
    assert_eq!(steps.len(), 2);
    let records = stores.ledger.inspect(sale).await.unwrap().unwrap();
    assert_eq!(records.payments.len(), 2);
    let cancel = stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    assert_eq!(cancel, TransitionOutcome::Illegal(OrderStatus::Paid));
    assert_eq!(check(stores, sale).await, 2);
}

pub async fn payments_that_cannot_pay_are_returned(stores: &Stores) {
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    for (n, (id, amount, reason)) in [
        (404, 100, RefundReason::UnknownOrder),
        (1, 99, RefundReason::WrongAmount),
        (1, -100, RefundReason::WrongAmount),
        (2, 100, RefundReason::OrderEnded),
    ]
    .into_iter()
    .enumerate()
    {
        let payment = payment(&format!("t{n}"), id, amount);
        assert_eq!(received(pay(stores, &payment).await), (PaymentStatus::RefundDue, Some(reason)));
        assert_eq!(stores.ledger.payments_of(order(id)).await.unwrap().last().unwrap().reported.order, order(id));
        // Those of unknown orders are in the records of no sale.
        let stray: Vec<_> = stores.ledger.stray_payments().await.unwrap();
        let stray: Vec<_> = stray.iter().map(|stray| (&stray.reported, stray.status, stray.reason)).collect();
        if n == 0 {
            assert_eq!(stray, [(&payment, PaymentStatus::RefundDue, Some(reason))]);
        } else {
            assert_eq!(stray.iter().map(|(_, status, _)| *status).collect::<Vec<_>>(), [PaymentStatus::Refunded]);
        }
        assert!(stores.ledger.complete_refund(&payment, NOW).await.unwrap());
        assert!(!stores.ledger.complete_refund(&payment, NOW).await.unwrap(), "returned once");
    }
    assert_eq!((status(stores, 1).await, status(stores, 2).await), (OrderStatus::Unpaid, OrderStatus::Rejected));
    assert_eq!(received(pay(stores, &payment("right", 1, 100)).await), (PaymentStatus::Paid, None));
    let second = received(pay(stores, &payment("second", 1, 100)).await);
    assert_eq!(second, (PaymentStatus::RefundDue, Some(RefundReason::AlreadyPaid)));
    assert_eq!(status(stores, 1).await, OrderStatus::Paid);
    assert!(!stores.ledger.complete_refund(&payment("right", 1, 100), NOW).await.unwrap(), "it has paid");
    // The order that was not known arrives.
    let in_sale = async || stores.ledger.inspect(sale).await.unwrap().unwrap().payments.len();
    let before = in_sale().await;
    record(stores, sale, &[(404, 4)]).await;
    assert_eq!((in_sale().await, stores.ledger.stray_payments().await.unwrap()), (before + 1, vec![]));
}

pub async fn late_payment_is_returned_and_revives_nothing(stores: &Stores) {
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1)]).await;
    stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    for transaction in ["a", "b"] {
        let late = received(pay(stores, &payment(transaction, 1, 100)).await);
        assert_eq!(late, (PaymentStatus::RefundDue, Some(RefundReason::OrderEnded)));
        assert_eq!(status(stores, 1).await, OrderStatus::Refunding);
    }
    // A repeated cancellation has the same outcome as before, and changes nothing.
    let cancelled_again = async |expected| {
        let buyer = stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
        let operator = stores.ledger.cancel_for_operator(order(1), NOW).await.unwrap();
        for again in [buyer, operator] {
            assert!(matches!(&again, TransitionOutcome::Repeated(order) if order.status == expected), "{again:?}");
        }
        assert_eq!(stores.ledger.pending_releases(None, 10).await.unwrap().len(), 1);
    };
    cancelled_again(OrderStatus::Refunding).await;
    assert_eq!(check(stores, sale).await, 0);
    assert_eq!(record(stores, sale, &[(2, 2)]).await, [RecordOutcome::Inserted], "its stock is free");
    assert!(stores.ledger.complete_refund(&payment("a", 1, 100), NOW).await.unwrap());
    assert_eq!(status(stores, 1).await, OrderStatus::Refunding, "the other one is left");
    assert!(stores.ledger.complete_refund(&payment("b", 1, 100), NOW).await.unwrap());
    assert_eq!(status(stores, 1).await, OrderStatus::Refunded);
    cancelled_again(OrderStatus::Refunded).await;
    let steps = stores.ledger.order_history(order(1)).await.unwrap();
    let steps: Vec<_> = steps.iter().map(|step| step.to).collect();
    use OrderStatus::{Cancelled, Refunded, Refunding, Unpaid};
    assert_eq!(steps, [Unpaid, Cancelled, Refunding, Refunded]);
}

/// Every order is paid, cancelled and expired at the same moment: one of them wins, and the payment has paid or is to be returned.
pub async fn payment_cancellation_and_expiry_have_one_winner(stores: &Stores) {
    let rounds = count(10_000, 60) as i64;
    let sale = sale_with_deadline(stores, u32::try_from(rounds).unwrap(), 1000).await;
    let due = NOW.plus(Duration::from_secs(1));
    let (mut paid, mut cancelled, mut expired) = (0, 0, 0);
    for id in 1..=rounds {
        record(stores, sale, &[(id, id)]).await;
        let ledger = [(); 3].map(|()| stores.ledger.clone());
        let [first, second, third] = ledger;
        let reported = payment(&format!("t{id}"), id, 100);
        let paying = tokio::spawn(async move { first.receive_payment(&reported, due, None).await.unwrap() });
        let cancelling = tokio::spawn(async move { second.cancel(order(id), user(id), due).await.unwrap() });
        let expiring = tokio::spawn(async move { third.expire_orders(due, 10, &[]).await.unwrap() });
        let (payment, cancel, expire) =
            (paying.await.unwrap(), cancelling.await.unwrap(), expiring.await.unwrap().orders);
        let (payment, _) = received(payment);
        let won = (payment == PaymentStatus::Paid, matches!(cancel, TransitionOutcome::Done(_)), expire == 1);
        assert_eq!(u32::from(won.0) + u32::from(won.1) + u32::from(won.2), 1, "{id}: {won:?}");
        let expected = if won.0 { OrderStatus::Paid } else { OrderStatus::Refunding };
        assert_eq!(status(stores, id).await, expected, "{id}");
        paid += usize::from(won.0);
        cancelled += usize::from(won.1);
        expired += usize::from(won.2);
    }
    assert_eq!(check(stores, sale).await, paid);
    assert_eq!(stores.ledger.pending_releases(None, 20_000).await.unwrap().len(), cancelled + expired);
}

async fn refund(stores: &Stores, id: i64) -> TransitionOutcome {
    stores.ledger.refund(order(id), NOW.plus(Duration::from_secs(2))).await.unwrap()
}

/// The payments whose return is due at this time.
pub async fn due_refunds(stores: &Stores, at: Timestamp) -> Vec<RefundAttempt> {
    stores.ledger.due_refunds(at, 100).await.unwrap()
}

/// A payment is due at once, whatever the clock of the node says that is asked to return it, or to which it is reported.
pub async fn refunds_do_not_wait_for_a_clock_that_is_ahead(stores: &Stores) {
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1)]).await;
    pay(stores, &payment("a", 1, 100)).await;
    let before = stores.ledger.now().await.unwrap().minus(Duration::from_millis(1));
    let ahead = before.plus(Duration::from_secs(3600));
    let due = async || {
        let due = due_refunds(stores, stores.ledger.now().await.unwrap()).await;
        due.into_iter().map(|attempt| attempt.payment.reported.transaction).collect::<Vec<_>>()
    };
    let refunding = stores.ledger.refund(order(1), ahead).await.unwrap();
    assert!(matches!(refunding, TransitionOutcome::Done(_)), "{refunding:?}");
    assert_eq!(due().await, ["a"]);
    assert_eq!(due_refunds(stores, before).await, [], "not before the request");
    stores.ledger.receive_payment(&payment("b", 404, 100), ahead, None).await.unwrap();
    assert_eq!(due().await.len(), 2);
    // What an operator wants to be tried again.
    let [attempt, _] = stores.ledger.open_refunds(10).await.unwrap().try_into().unwrap();
    stores.ledger.fail_refund(&attempt, "away", None).await.unwrap();
    assert_eq!(due().await.len(), 1);
    let reported = attempt.payment.reported;
    assert!(stores.ledger.retry_refund("p", &reported.transaction, ahead).await.unwrap());
    assert_eq!(due().await.len(), 2);
}

pub async fn paid_orders_are_refunded_once(stores: &Stores) {
    let (sale, later) = (sale_of(stores, 2).await, NOW.plus(Duration::from_secs(60)));
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    assert_eq!(refund(stores, 1).await, TransitionOutcome::Illegal(OrderStatus::Unpaid));
    assert_eq!(refund(stores, 404).await, TransitionOutcome::NoSuchOrder);
    let reported = payment("a", 1, 100);
    pay(stores, &reported).await;
    assert_eq!(due_refunds(stores, later).await, []);
    let TransitionOutcome::Done(refunding) = refund(stores, 1).await else { panic!("not refunded") };
    assert_eq!((refunding.id, refunding.status), (order(1), OrderStatus::Refunding));
    assert_eq!(refund(stores, 1).await, TransitionOutcome::Repeated(refunding));
    let cancel = stores.ledger.cancel(order(1), user(1), later).await.unwrap();
    assert_eq!(cancel, TransitionOutcome::Illegal(OrderStatus::Refunding), "it was never cancelled");
    assert_eq!(check(stores, sale).await, 1, "its stock is free");
    assert_eq!(stores.ledger.pending_releases(None, 10).await.unwrap().len(), 1);

    let [first] = due_refunds(stores, later).await.try_into().unwrap();
    assert_eq!((&first.payment.reported, first.tries), (&reported, 0));
    assert_eq!(first.payment.reason, Some(RefundReason::Requested));
    assert!(stores.ledger.begin_refund(&first, later).await.unwrap());
    assert!(!stores.ledger.begin_refund(&first, later).await.unwrap(), "another process has begun it");
    assert_eq!(due_refunds(stores, later.minus(Duration::from_millis(1))).await, []);
    stores.ledger.fail_refund(&first, "slow", None).await.unwrap();
    let [begun] = stores.ledger.open_refunds(10).await.unwrap().try_into().unwrap();
    assert_eq!((begun.due_at, begun.error.as_deref()), (Some(later), None), "an attempt has begun since");
    stores.ledger.fail_refund(&begun, "away", None).await.unwrap();
    assert_eq!(due_refunds(stores, later.plus(Duration::from_secs(1_000_000))).await, [], "an operator must do it");
    let [open] = stores.ledger.open_refunds(10).await.unwrap().try_into().unwrap();
    assert_eq!((open.due_at, open.tries, open.error.as_deref()), (None, 1, Some("away")));
    assert!(stores.ledger.retry_refund("p", "a", later).await.unwrap());
    assert!(!stores.ledger.retry_refund("p", "b", later).await.unwrap());
    stores.ledger.fail_refund(&begun, "away", None).await.unwrap();
    assert_eq!(due_refunds(stores, later).await[0].tries, 0, "counted from the first again");

    assert!(stores.ledger.complete_refund(&reported, later).await.unwrap());
    assert_eq!(stores.ledger.open_refunds(10).await.unwrap(), []);
    assert!(!stores.ledger.retry_refund("p", "a", later).await.unwrap(), "it is returned");
    assert_eq!(stores.ledger.payment("p", "a").await.unwrap().unwrap().status, PaymentStatus::Refunded);
    let steps = stores.ledger.order_history(order(1)).await.unwrap();
    let steps: Vec<_> = steps.iter().map(|step| (step.to, step.by)).collect();
    use OrderStatus::{Paid, Refunded, Refunding, Unpaid};
    assert_eq!(
        steps,
        [(Unpaid, Actor::System), (Paid, Actor::Provider), (Refunding, Actor::Operator), (Refunded, Actor::Provider)]
    );
}

pub async fn codes_are_tried_a_few_times(stores: &Stores) {
    let (sale, ledger) = (sale_of(stores, 1).await, &stores.ledger);
    record(stores, sale, &[(1, 1)]).await;
    let code = async |new: &str| ledger.redeem_code(order(1), new).await.unwrap();
    assert_eq!(code("AAAA").await, None, "it is not paid");
    assert_eq!(ledger.redeem(order(1), NOW).await.unwrap(), TransitionOutcome::Illegal(OrderStatus::Unpaid));
    pay(stores, &payment("a", 1, 100)).await;
    assert_eq!(ledger.try_redeem_code(order(1)).await.unwrap(), None, "nobody has asked for a code");
    assert_eq!(code("AAAA").await.as_deref(), Some("AAAA"));
    assert_eq!(code("BBBB").await.as_deref(), Some("AAAA"), "it stays");
    let tries = (0..20).map(|_| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.try_redeem_code(order(1)).await.unwrap() })
    });
    let mut allowed = 0;
    for one in tries.collect::<Vec<_>>() {
        allowed += u32::from(one.await.unwrap().is_some());
    }
    assert_eq!(allowed, MAX_REDEEM_TRIES, "of twenty at once");
    assert_eq!(code("BBBB").await.as_deref(), Some("BBBB"), "its owner gets another one");
    assert_eq!(ledger.try_redeem_code(order(1)).await.unwrap().as_deref(), Some("BBBB"));
    let TransitionOutcome::Done(redeemed) = ledger.redeem(order(1), NOW).await.unwrap() else { panic!("not redeemed") };
    assert_eq!(redeemed.status, OrderStatus::Redeemed);
    assert_eq!(ledger.redeem(order(1), NOW).await.unwrap(), TransitionOutcome::Illegal(OrderStatus::Redeemed));
    assert_eq!((code("CCCC").await, ledger.try_redeem_code(order(1)).await.unwrap()), (None, None));
    assert_eq!(check(stores, sale).await, 1, "it was sold");
}

/// Every order is refunded and redeemed, twice each, at the same moment: one of the four wins.
pub async fn refund_and_redemption_have_one_winner(stores: &Stores) {
    let rounds = usize::try_from(count(10_000, 40)).unwrap();
    let sale = sale_of(stores, u32::try_from(rounds).unwrap()).await;
    let mut redeemed = 0;
    for id in 1..=i64::try_from(rounds).unwrap() {
        record(stores, sale, &[(id, id)]).await;
        pay(stores, &payment(&format!("t{id}"), id, 100)).await;
        let attempts = (0..4).map(|n| {
            let ledger = stores.ledger.clone();
            tokio::spawn(async move {
                let redeems = n % 2 == 0;
                let outcome = if redeems { ledger.redeem(order(id), NOW) } else { ledger.refund(order(id), NOW) };
                (redeems, matches!(outcome.await.unwrap(), TransitionOutcome::Done(_)))
            })
        });
        let mut winners = Vec::new();
        for attempt in attempts.collect::<Vec<_>>() {
            let (redeems, has_won) = attempt.await.unwrap();
            winners.extend(has_won.then_some(redeems));
        }
        let expected = match winners[..] {
            [true] => OrderStatus::Redeemed,
            [false] => OrderStatus::Refunding,
            _ => panic!("{id}: {winners:?}"),
        };
        assert_eq!(status(stores, id).await, expected, "{id}");
        redeemed += usize::from(winners[0]);
    }
    assert_eq!(check(stores, sale).await, redeemed);
    assert_eq!(due_refunds(stores, NOW).await.len(), 100.min(rounds - redeemed), "the others are to be returned");
}
