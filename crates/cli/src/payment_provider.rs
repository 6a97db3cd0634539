//! Asks the payment provider at a URL of the operator to return payments.

use async_trait::async_trait;
use serde_json::json;
use stampede_core::Payment;
use stampede_engine::PaymentProvider;

use crate::webhook::WebhookClient;

#[derive(Debug)]
pub struct RefundWebhook(pub WebhookClient);

#[async_trait]
impl PaymentProvider for RefundWebhook {
    async fn refund(&self, payment: &Payment) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let reported = &payment.reported;
        let body = json!({
            "transaction_id": reported.transaction,
            "order_id": reported.order,
            "amount_cents": reported.amount_cents,
            "reason": payment.reason,
        });
        Ok(self.0.post(&body.to_string()).await?)
    }
}
