//! Alerts: problems that need an operator. Any node may raise one; it is sent once, and again after a while if the problem persists.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics::counter;
use parking_lot::Mutex;
use stampede_core::ports::{Ledger, LedgerError};

use crate::error::describe;

/// Alerts that a node remembers having raised. If there are more, the ledger decides alone.
const MAX_REMEMBERED: usize = 1000;

/// The kind of an alert, as in the metric and in the documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AlertKind {
    /// Reconciling found a difference that it could not repair.
    RepairFailed,
    /// Marks of dead orders could not be released for a while: their stock is not sold.
    ReleaseFailed,
    /// An order cannot be recorded and waits for an operator.
    Quarantined,
    /// Redis must be set up differently; nothing is sold meanwhile.
    Unsuitable,
    /// A sale cannot be loaded into the gate again; it is closed, the others are sold.
    NotRebuilt,
    /// The gate is rebuilt again and again.
    RebuiltRepeatedly,
    /// Orders of a sale cannot be recorded: the queue has delivered them, and those of other sales can; or every order of a batch was
    /// rejected.
    NotRecorded,
    /// Nothing can be published to the broker of the queue.
    Broker,
    /// A payment must be returned, and no provider is set that does it.
    RefundDue,
    /// The provider has not returned a payment.
    RefundFailed,
    /// A provider has reported two payments with one transaction id.
    TransactionReused,
    /// Orders of a sale that were not paid in time cannot be cancelled, so that their stock is not sold.
    NotExpired,
    /// A signed callback was refused: its content is not valid, or it came too late. A payment may not be recorded.
    CallbackRefused,
    /// The receiver of events does not accept one; it and the later ones of its order are set aside.
    EventRejected,
}

impl AlertKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RepairFailed => "repair_failed",
            Self::ReleaseFailed => "release_failed",
            Self::Quarantined => "quarantined",
            Self::Unsuitable => "redis_unsuitable",
            Self::NotRebuilt => "sale_not_rebuilt",
            Self::RebuiltRepeatedly => "gate_rebuilt_repeatedly",
            Self::NotRecorded => "sale_not_recorded",
            Self::Broker => "broker_unusable",
            Self::RefundDue => "refund_due",
            Self::RefundFailed => "refund_failed",
            Self::TransactionReused => "transaction_reused",
            Self::NotExpired => "orders_not_expired",
            Self::CallbackRefused => "callback_refused",
            Self::EventRejected => "event_rejected",
        }
    }
}

/// One problem that needs an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alert {
    pub kind: AlertKind,
    /// What it is about, such as `sale 12`.
    pub about: String,
    pub message: String,
}

/// Delivers alerts to operators.
#[async_trait]
pub trait AlertSender: Send + Sync + fmt::Debug {
    async fn send(&self, alert: &Alert) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// How alerts are delivered.
#[derive(Debug, Clone)]
pub struct AlertConfig {
    /// `None`: alerts are only logged.
    pub sender: Option<Arc<dyn AlertSender>>,
    /// When an alert is sent again if its problem persists.
    pub repeat_after: Duration,
}

/// What the ledger calls the case of an alert.
fn case(kind: AlertKind, about: &str) -> String {
    format!("{} {about}", kind.as_str())
}

#[derive(Debug)]
pub(crate) struct Alerts {
    config: AlertConfig,
    ledger: Arc<dyn Ledger>,
    /// When this node has last raised an alert, so that the ledger is not asked every time.
    raised: Mutex<HashMap<(AlertKind, String), Instant>>,
}

impl Alerts {
    pub(crate) fn new(config: AlertConfig, ledger: Arc<dyn Ledger>) -> Self {
        Self { config, ledger, raised: Mutex::default() }
    }

    /// Sends an alert, unless a node has sent it lately. If the ledger cannot be asked, it is sent. Returns whether this node has sent it.
    pub(crate) async fn raise(&self, kind: AlertKind, about: String, message: String) -> bool {
        if !self.is_due(kind, &about) {
            return false;
        }
        match self.claim(&case(kind, &about)).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(error) => tracing::warn!(error = describe(&error), "cannot record an alert; it may be sent twice"),
        }
        tracing::error!(alert = kind.as_str(), about, message, "an operator is needed");
        counter!("stampede_alerts_total", "alert" => kind.as_str()).increment(1);
        if let Some(sender) = &self.config.sender
            && let Err(error) = sender.send(&Alert { kind, about, message }).await
        {
            tracing::error!(alert = kind.as_str(), error = describe(&*error), "an alert could not be delivered");
        }
        true
    }

    /// Notes that a case has ended which this node has raised: if it begins again, it is a new one.
    pub(crate) async fn clear(&self, kind: AlertKind, about: &str) {
        self.raised.lock().remove(&(kind, about.to_owned()));
        if let Err(error) = self.ledger.clear_alert(&case(kind, about)).await {
            tracing::warn!(alert = kind.as_str(), about, error = describe(&error), "cannot note that a case has ended");
        }
    }

    /// By the clock of the ledger: the clocks of nodes may differ by more than `repeat_after`.
    async fn claim(&self, case: &str) -> Result<bool, LedgerError> {
        let now = self.ledger.now().await?;
        self.ledger.claim_alert(case, now, self.config.repeat_after).await
    }

    fn is_due(&self, kind: AlertKind, about: &str) -> bool {
        let mut raised = self.raised.lock();
        raised.retain(|_, at| at.elapsed() < self.config.repeat_after);
        let key = (kind, about.to_owned());
        if raised.contains_key(&key) {
            return false;
        }
        if raised.len() < MAX_REMEMBERED {
            raised.insert(key, Instant::now());
        }
        true
    }
}

#[cfg(test)]
mod tests;
