//! Alerts: problems that need an operator. Any node may raise one; it is sent once, and again after a while if the problem persists.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics::counter;
use parking_lot::Mutex;
use stampede_core::Clock;
use stampede_core::ports::Ledger;

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

#[derive(Debug)]
pub(crate) struct Alerts {
    config: AlertConfig,
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
    /// When this node has last raised an alert, so that the ledger is not asked every time.
    raised: Mutex<HashMap<(AlertKind, String), Instant>>,
}

impl Alerts {
    pub(crate) fn new(config: AlertConfig, ledger: Arc<dyn Ledger>, clock: Arc<dyn Clock>) -> Self {
        Self { config, ledger, clock, raised: Mutex::default() }
    }

    /// Sends an alert, unless a node has sent it lately. If the ledger cannot be asked, it is sent.
    pub(crate) async fn raise(&self, kind: AlertKind, about: String, message: String) {
        if !self.is_due(kind, &about) {
            return;
        }
        let case = format!("{} {about}", kind.as_str());
        match self.ledger.claim_alert(&case, self.clock.now(), self.config.repeat_after).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => tracing::warn!(error = describe(&error), "cannot record an alert; it may be sent twice"),
        }
        tracing::error!(alert = kind.as_str(), about, message, "an operator is needed");
        counter!("stampede_alerts_total", "alert" => kind.as_str()).increment(1);
        if let Some(sender) = &self.config.sender
            && let Err(error) = sender.send(&Alert { kind, about, message }).await
        {
            tracing::error!(alert = kind.as_str(), error = describe(&*error), "an alert could not be delivered");
        }
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
