//! The checks of the steps that orders have taken.

use std::collections::{HashMap, HashSet};

use stampede_core::ports::{OrderRow, SaleRecords};
use stampede_core::{
    OrderEvent, OrderId, OrderStatus, Payment, PaymentStatus, RefundReason, StepReason, Timestamp, UserId,
};

use super::findings::{FindingId, Findings};
use super::{Evidence, Rules};

/// The administration routes return the status of an order and not its steps.
pub(super) fn unknown(sales: &[Evidence]) -> Option<String> {
    let unknown = sales.iter().any(|sale| !sale.from_database);
    unknown.then(|| format!("{}; no order is in an impossible state", super::NO_DATABASE))
}

/// Every step is legal, follows the one before, and the last one leads to the order's status.
pub(super) fn legal_steps(evidence: &Evidence, findings: &mut Findings) {
    legal_states(evidence, findings);
    if !evidence.from_database {
        return;
    }
    let sale = evidence.ledger.sale.id;
    let mut steps: HashMap<OrderId, Vec<OrderEvent>> = HashMap::new();
    for (order, event) in &evidence.ledger.events {
        steps.entry(*order).or_default().push(*event);
    }
    for row in &evidence.ledger.orders {
        let (order, id) = (&row.order, row.order.id);
        let mut last = OrderEvent::recorded(order, row.reason);
        for step in steps.remove(&id).unwrap_or_default() {
            let (from, to) = (step.from.as_str(), step.to.as_str());
            if step.from != last.to || !step.from.may_become(step.to) {
                let text = format!("order {id} was {} and took the step from {from} to {to}", last.to.as_str());
                findings.add(FindingId::order("step", sale, id), text);
            }
            if step.at < last.at {
                let text = format!("order {id} became {to} before it was {from}");
                findings.add(FindingId::order("step time", sale, id), text);
            }
            // One clock decides that an order is due and gives the time of the step, so no difference of clocks is allowed for.
            if step.reason == Some(StepReason::Expired) && order.pay_by.is_some_and(|pay_by| step.at < pay_by) {
                let text = format!("order {id} expired before it had to be paid");
                findings.add(FindingId::order("expired early", sale, id), text);
            }
            last = step;
        }
        if last.to != order.status {
            let (last, status) = (last.to.as_str(), order.status.as_str());
            let text = format!("order {id} is {status}, its last step led to {last}");
            findings.add(FindingId::order("last step", sale, id), text);
        }
    }
    for (id, _) in steps {
        findings.add(FindingId::order("no row", sale, id), format!("order {id} took a step and has no row"));
    }
}

fn legal_states(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in &evidence.ledger.orders {
        let (order, id) = (&row.order, row.order.id);
        if row.live != order.status.is_live() {
            let live = if row.live { "live" } else { "not live" };
            findings.add(
                FindingId::order("live", sale.id, id),
                format!("order {id} is {} and {live}", order.status.as_str()),
            );
        }
        if order.updated_at < order.created_at {
            findings
                .add(FindingId::order("updated", sale.id, id), format!("order {id} was updated before it was created"));
        }
        if order.price != sale.price {
            let (price, of_sale) = (order.price.cents(), sale.price.cents());
            findings.add(
                FindingId::order("price", sale.id, id),
                format!("order {id} has the price {price}, its sale {of_sale}"),
            );
        }
    }
}

/// Every payment has paid its order, was returned, or will be; at rest none waits. An order is paid by one payment. One that is refunding has
/// a payment to be returned, and a refunded one has a payment that was. A payment that has paid another order than the reported one came after
/// that had ended.
pub(super) fn payments_have_ended(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = evidence.ledger.sale.id;
    let rows: HashMap<OrderId, &OrderRow> = evidence.ledger.orders.iter().map(|row| (row.order.id, row)).collect();
    let mut paid: HashMap<OrderId, u32> = HashMap::new();
    let (mut to_return, mut returned) = (HashSet::new(), HashSet::new());
    for payment in &evidence.ledger.payments {
        let (id, transaction) = (payment.order, &payment.reported.transaction);
        if payment.was_moved() && !may_be_moved(payment, &rows) {
            let reported = payment.reported.order;
            let text = format!("the payment {transaction} for order {reported} was moved to order {id}");
            findings.add(FindingId::order("moved", sale, id), text);
        }
        match payment.status {
            PaymentStatus::Paid => {
                *paid.entry(id).or_default() += 1;
                let amount = payment.reported.amount_cents;
                let price = rows.get(&id).map(|row| row.order.price.cents());
                if let Some(price) = price.filter(|price| *price != amount) {
                    let text = format!("order {id} costs {price} cents, and was paid with {amount} cents");
                    findings.add(FindingId::order("amount", sale, id), text);
                }
            }
            PaymentStatus::RefundDue => {
                to_return.insert(id);
                if rules.at_rest {
                    let text = format!("the payment {transaction} for order {id} is not returned");
                    findings.add(FindingId::order("not returned", sale, id), text);
                }
            }
            PaymentStatus::Refunded => _ = returned.insert(id),
        }
    }
    for (id, row) in rows {
        match row.order.status {
            OrderStatus::Refunding if !to_return.contains(&id) => {
                let text = format!("order {id} is refunding, and no payment of it is to be returned");
                findings.add(FindingId::order("nothing to return", sale, id), text);
            }
            OrderStatus::Refunded if !returned.contains(&id) => {
                let text = format!("order {id} is refunded, and no payment of it was returned");
                findings.add(FindingId::order("nothing returned", sale, id), text);
            }
            _ => {}
        }
        let was_paid = matches!(row.order.status, OrderStatus::Paid | OrderStatus::Redeemed);
        let payments = paid.get(&id).copied().unwrap_or(0);
        if u32::from(was_paid) != payments {
            let status = row.order.status.as_str();
            let text = format!("order {id} is {status}, and {payments} payments have paid it");
            findings.add(FindingId::order("payments", sale, id), text);
        }
    }
}

/// A payment for an order that the ledger does not have pays nothing, so it was returned, or will be; at rest none waits.
pub(super) fn stray_payments_have_ended(payments: &[Payment], rules: Rules) -> Findings {
    let mut findings = Findings::default();
    for payment in payments {
        let (id, transaction) = (payment.order, &payment.reported.transaction);
        let fault = match payment.status {
            PaymentStatus::Paid => "has paid it",
            PaymentStatus::RefundDue if rules.at_rest => "is not returned",
            PaymentStatus::RefundDue | PaymentStatus::Refunded => continue,
        };
        let text = format!("the payment {transaction} for order {id}, which has no row, {fault}");
        findings.add(FindingId::unknown_order("stray payment", id), text);
    }
    findings
}

/// Whether both orders of a moved payment are of one buyer, and the first has ended.
fn may_be_moved(payment: &Payment, rows: &HashMap<OrderId, &OrderRow>) -> bool {
    let (Some(ended), Some(new)) = (rows.get(&payment.reported.order), rows.get(&payment.order)) else { return false };
    !ended.live && ended.order.user == new.order.user
}

/// When each payment came that was reported for an order which had ended, with the owner of that order: the owner may have got a new order
/// then, without a request.
pub(super) fn late_payments(ledger: &SaleRecords) -> Vec<(UserId, Timestamp)> {
    let owners: HashMap<OrderId, UserId> = ledger.orders.iter().map(|row| (row.order.id, row.order.user)).collect();
    let is_late = |payment: &&Payment| payment.was_moved() || payment.reason == Some(RefundReason::OrderEnded);
    let late = ledger.payments.iter().filter(is_late);
    late.filter_map(|payment| Some((*owners.get(&payment.reported.order)?, payment.received_at))).collect()
}

/// When the stock of each dead order was returned. Later steps, such as the refund of a late payment, change the row's time.
pub(super) fn ended_at(ledger: &SaleRecords) -> HashMap<OrderId, Timestamp> {
    let ends = ledger.events.iter().filter(|(_, step)| step.from.is_live() && !step.to.is_live());
    let ends: HashMap<OrderId, Timestamp> = ends.map(|(order, step)| (*order, step.at)).collect();
    let dead = ledger.orders.iter().filter(|row| !row.live);
    dead.map(|row| (row.order.id, ends.get(&row.order.id).copied().unwrap_or(row.order.updated_at))).collect()
}

/// While payments are still to be returned, it is not known how they end.
pub(super) fn open_refunds(sales: &[Evidence], stray: &[Payment], rules: Rules) -> Option<String> {
    let payments = sales.iter().flat_map(|sale| &sale.ledger.payments).chain(stray);
    let open = payments.filter(|payment| payment.status == PaymentStatus::RefundDue).count();
    (open > 0 && !rules.at_rest).then(|| format!("{open} payments are still to be returned"))
}

/// Whether the order ended without a request of its buyer: it was not paid in time, an operator has cancelled or refunded it, or it was made
/// for a late payment that is returned.
pub(super) fn has_ended_unasked(row: &OrderRow) -> bool {
    let unasked = [StepReason::Expired, StepReason::Operator, StepReason::PaymentReturned];
    !row.live && row.reason.is_some_and(|reason| unasked.contains(&reason))
}
