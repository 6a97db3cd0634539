//! Posts the steps of orders to a URL of the operator.

use async_trait::async_trait;
use hyper::StatusCode;
use serde_json::{Value, json};
use stampede_core::ports::OutgoingEvent;
use stampede_engine::{EventError, EventSender};

use crate::webhook::{PostError, WebhookClient};

#[derive(Debug)]
pub struct EventWebhook(pub WebhookClient);

fn to_json(event: &OutgoingEvent) -> Value {
    let OutgoingEvent { order, sale, user, step } = event;
    json!({
        "id": event.id(),
        "order_id": order,
        "sale_id": sale,
        "user_id": user,
        "from": step.from,
        "to": step.to,
        "at": step.at,
        "reason": step.reason,
        "by": step.by,
        "number": event.number(),
    })
}

/// The answers that speak of what a message contains. Any other may come from a proxy, a wrong address or a wrong secret, and end without a
/// change of the message.
const REJECTIONS: [StatusCode; 3] =
    [StatusCode::BAD_REQUEST, StatusCode::PAYLOAD_TOO_LARGE, StatusCode::UNPROCESSABLE_ENTITY];

#[async_trait]
impl EventSender for EventWebhook {
    async fn send(&self, events: &[OutgoingEvent]) -> Result<(), EventError> {
        let events: Vec<Value> = events.iter().map(to_json).collect();
        let message = json!({ "events": events }).to_string();
        self.0.post(&message).await.map_err(|error| match error {
            PostError::Refused(status) if REJECTIONS.contains(&status) => EventError::Rejected(error.into()),
            error => EventError::Unavailable(error.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_message_are_rejections() {
        let rejections = (100..600).filter(|&status| REJECTIONS.contains(&StatusCode::from_u16(status).unwrap()));
        assert_eq!(rejections.collect::<Vec<_>>(), [400, 413, 422]);
    }
}
