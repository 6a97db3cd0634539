//! Events of orders for a receiver of the operator: how they are sent, and what an operator does with those that were rejected.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stampede_core::OrderId;
use stampede_core::ports::{OutboxEntry, OutgoingEvent};

use crate::engine::Engine;
use crate::error::Error;

/// Why a message was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// The receiver cannot be used at the moment, whatever the message contains.
    #[error("the receiver cannot be used")]
    Unavailable(#[source] Box<dyn StdError + Send + Sync>),
    /// The receiver does not accept what the message contains.
    #[error("the receiver rejected it")]
    Rejected(#[source] Box<dyn StdError + Send + Sync>),
}

/// Delivers events to a receiver of the operator.
#[async_trait]
pub trait EventSender: Send + Sync + fmt::Debug {
    /// Sends events in one message, which is accepted or rejected as a whole. An event may be sent again although it was accepted.
    async fn send(&self, events: &[OutgoingEvent]) -> Result<(), EventError>;
}

/// How events are delivered.
#[derive(Debug, Clone)]
pub struct EventConfig {
    pub sender: Arc<dyn EventSender>,
    /// The pause after the first failure. It doubles with each further one, up to a minute.
    pub retry_pause: Duration,
}

impl Engine {
    /// The events that are set aside, the oldest first.
    pub async fn failed_events(&self, limit: u32) -> Result<Vec<OutboxEntry>, Error> {
        Ok(self.stores.ledger.failed_events(limit).await?)
    }

    /// The number of entries in the outbox; a recorded batch is one.
    pub async fn waiting_events(&self) -> Result<u64, Error> {
        Ok(self.stores.ledger.count_events().await?)
    }

    /// Has events sent again that are set aside, of one order or of all. Returns how many.
    pub async fn retry_events(&self, order: Option<OrderId>) -> Result<u64, Error> {
        Ok(self.stores.ledger.retry_events(order).await?)
    }
}
