//! Payments. A payment locks its order and not the sale.

use stampede_core::ports::{PaymentOutcome, Result};
use stampede_core::{
    Actor, Order, OrderEvent, OrderId, OrderStatus, Payment, PaymentStatus, RefundReason, ReportedPayment, SaleId,
    StepReason, Timestamp,
};

use super::orders::read_locked;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args};

pub(super) const COLUMNS: &str =
    "provider, transaction_id, order_id, amount_cents, status, reason, received_at, reported_order";

pub(super) fn read(row: &Row) -> Result<Payment> {
    let bad = || unreadable("a payment");
    let reason = row.maybe_text(5)?.map(|reason| RefundReason::parse(&reason).ok_or_else(bad)).transpose()?;
    let id = |id| OrderId::new(id).map_err(|_| bad());
    let order = id(row.int(2)?)?;
    Ok(Payment {
        reported: ReportedPayment {
            provider: row.text(0)?,
            transaction: row.text(1)?,
            order: row.maybe_int(7)?.map(id).transpose()?.unwrap_or(order),
            amount_cents: row.int(3)?,
        },
        order,
        status: PaymentStatus::parse(&row.text(4)?).ok_or_else(bad)?,
        reason,
        received_at: Timestamp::from_ms(row.int(6)?),
    })
}

/// Why the payment cannot pay this order; `None` if it can.
fn refusal(order: Option<&Order>, amount_cents: i64) -> Option<RefundReason> {
    match order {
        None => Some(RefundReason::UnknownOrder),
        Some(order) => match order.status {
            OrderStatus::Unpaid if order.price.cents() == amount_cents => None,
            OrderStatus::Unpaid => Some(RefundReason::WrongAmount),
            OrderStatus::Paid | OrderStatus::Redeemed => Some(RefundReason::AlreadyPaid),
            OrderStatus::Pending
            | OrderStatus::Cancelled
            | OrderStatus::Refunding
            | OrderStatus::Refunded
            | OrderStatus::Rejected => Some(RefundReason::OrderEnded),
        },
    }
}

/// Whether the payment comes for an order that was cancelled, and has its price: with that, a new order could be paid.
fn is_late(order: &Order, amount_cents: i64) -> bool {
    order.status == OrderStatus::Cancelled && order.price.cents() == amount_cents
}

/// The payments of a sale's orders with an id in `after..=last`.
pub(super) async fn read_payments_in(
    tx: &mut Tx,
    sale: SaleId,
    after: i64,
    last: i64,
    into: &mut Vec<Payment>,
) -> Result<()> {
    let sql = "SELECT p.provider, p.transaction_id, p.order_id, p.amount_cents, p.status, p.reason, p.received_at,
        p.reported_order FROM payment p JOIN orders o ON o.id = p.order_id WHERE p.order_id > ? AND p.order_id <= ? AND o.sale_id = ?";
    for row in &tx.rows(sql, args![after, last, sale.get()]).await? {
        into.push(read(row)?);
    }
    Ok(())
}

impl Store {
    pub(super) async fn insert_payment(
        &self,
        reported: &ReportedPayment,
        now: Timestamp,
        held_until: Option<Timestamp>,
    ) -> Result<PaymentOutcome> {
        let ReportedPayment { provider, transaction, order: id, amount_cents } = reported;
        let mut tx = self.db.begin().await?;
        // Locked, so that of several payments, a cancellation and the end of the time to pay one is first.
        let order = read_locked(&mut tx, self.db.dialect(), *id).await?;
        let reason = refusal(order.as_ref(), *amount_cents);
        let held_until = held_until.filter(|_| order.as_ref().is_some_and(|order| is_late(order, *amount_cents)));
        let status = if reason.is_none() { PaymentStatus::Paid } else { PaymentStatus::RefundDue };
        let insert = "INSERT INTO payment (provider, transaction_id, order_id, amount_cents, status, received_at)
            VALUES (?, ?, ?, ?, ?, ?)";
        let (provider, transaction) = (provider.as_str(), transaction.as_str());
        let values = args![provider, transaction, id.get(), *amount_cents, status.as_str(), now.ms()];
        let inserted = tx.insert_new(insert, values).await?;
        if !inserted {
            tx.roll_back().await?;
            return self.known_payment(reported).await;
        }
        if let Some(reason) = reason {
            let (refund_ms, held) = match held_until {
                Some(until) => (until.ms(), 1_i64),
                None => (self.due_at_once(&mut tx, now).await?, 0),
            };
            let update =
                "UPDATE payment SET reason = ?, refund_at = ?, held = ? WHERE provider = ? AND transaction_id = ?";
            let values = args![reason.as_str(), refund_ms, held, provider, transaction];
            tx.execute_on(1, update, values).await?;
        }
        let payment = Payment { reported: reported.clone(), order: *id, status, reason, received_at: now };
        let outcome = match (order, held_until) {
            (Some(order), Some(_)) => PaymentOutcome::Held(payment, order),
            (Some(mut order), None) => {
                if reason.is_none() {
                    self.pay_order(&mut tx, &mut order, now).await?;
                } else if order.status == OrderStatus::Cancelled {
                    self.begin_refunding(&mut tx, &mut order, now).await?;
                }
                PaymentOutcome::Received(payment)
            }
            (None, _) => PaymentOutcome::Received(payment),
        };
        tx.commit().await?;
        Ok(outcome)
    }

    /// An order whose row is locked takes a step that changes neither whether it is live nor the stock.
    async fn take_step(
        &self,
        tx: &mut Tx,
        order: &mut Order,
        to: OrderStatus,
        reason: Option<StepReason>,
        now: Timestamp,
    ) -> Result<()> {
        let (id, from, at) = (order.id, order.status, now.max(order.updated_at));
        let update = "UPDATE orders SET status = ?, updated_at = ? WHERE id = ? AND status = ?";
        tx.execute_on(1, update, args![to.as_str(), at.ms(), id.get(), from.as_str()]).await?;
        (order.status, order.updated_at) = (to, at);
        let step = OrderEvent { from, to, at, reason, by: Actor::Provider };
        self.insert_events(tx, order.sale, &[(id, at)], step).await
    }

    /// A payment pays an unpaid order.
    pub(super) async fn pay_order(&self, tx: &mut Tx, order: &mut Order, now: Timestamp) -> Result<()> {
        self.take_step(tx, order, OrderStatus::Paid, Some(StepReason::Payment), now).await
    }

    /// A payment of a cancelled order is to be returned.
    pub(super) async fn begin_refunding(&self, tx: &mut Tx, order: &mut Order, now: Timestamp) -> Result<()> {
        self.take_step(tx, order, OrderStatus::Refunding, Some(StepReason::LatePayment), now).await
    }

    /// All payments of an order were returned.
    pub(super) async fn end_refunding(&self, tx: &mut Tx, order: &mut Order, now: Timestamp) -> Result<()> {
        self.take_step(tx, order, OrderStatus::Refunded, None, now).await
    }

    /// The outcome of a payment whose transaction id exists.
    async fn known_payment(&self, reported: &ReportedPayment) -> Result<PaymentOutcome> {
        let sql = format!("SELECT {COLUMNS}, held FROM payment WHERE provider = ? AND transaction_id = ?");
        let row = self.db.row(&sql, args![reported.provider.as_str(), reported.transaction.as_str()]).await?;
        let row = row.ok_or_else(|| unreadable("a payment"))?;
        let (known, is_held) = (read(&row)?, row.int(8)? != 0);
        Ok(match known.reported == *reported {
            true if is_held => PaymentOutcome::StillHeld,
            true => PaymentOutcome::Repeated(known),
            false => PaymentOutcome::TransactionReused(known),
        })
    }

    pub(super) async fn read_payment(&self, provider: &str, transaction: &str) -> Result<Option<Payment>> {
        let sql = format!("SELECT {COLUMNS} FROM payment WHERE provider = ? AND transaction_id = ?");
        let row = self.db.row(&sql, args![provider, transaction]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn read_stray_payments(&self) -> Result<Vec<Payment>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM payment WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.id = payment.order_id)"
        );
        self.db.rows(&sql, args![]).await?.iter().map(read).collect()
    }

    pub(super) async fn read_payments_of(&self, order: OrderId) -> Result<Vec<Payment>> {
        let sql = format!(
            "SELECT {COLUMNS} FROM payment WHERE order_id = ?
            UNION ALL SELECT {COLUMNS} FROM payment WHERE reported_order = ?"
        );
        self.db.rows(&sql, args![order.get(), order.get()]).await?.iter().map(read).collect()
    }
}
