//! Delivers alerts to the webhook and the phones of `[alerts]`.

use std::sync::Arc;

use async_trait::async_trait;
use stampede_core::Phone;
use stampede_engine::{Alert, AlertSender, Sender};

use crate::webhook::Webhook;

#[derive(Debug)]
pub struct AlertDelivery {
    pub webhook: Option<Webhook>,
    pub phones: Vec<Phone>,
    /// The sender of login codes.
    pub sender: Option<Arc<dyn Sender>>,
}

#[async_trait]
impl AlertSender for AlertDelivery {
    async fn send(&self, alert: &Alert) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut failed = None;
        if let Some(webhook) = &self.webhook {
            failed = AlertSender::send(webhook, alert).await.err();
        }
        if let Some(sender) = &self.sender {
            let text = format!("Stampede: {}, {}: {}", alert.kind.as_str(), alert.about, alert.message);
            for phone in &self.phones {
                failed = sender.send_text(phone, &text).await.err().or(failed);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}
