//! Every action of an administrator is written to the audit log twice: before it is carried out, and with its outcome.
//!
//! - `changes`: what was changed, field by field
//! - `log`: the log as it is read

mod changes;
mod log;

use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stampede_core::Code;
use stampede_core::ports::AuditRow;

pub use changes::{Auditable, Change};
pub use log::{AuditOutcome, AuditRecord};

use crate::engine::Engine;
use crate::error::{Error, describe};

/// How much of an error's text is kept.
const MAX_ERROR_CHARS: usize = 1000;

/// An administrator, and the request that they sent.
#[derive(Debug, Clone)]
pub struct Caller {
    pub name: Arc<str>,
    pub address: IpAddr,
    pub request_id: Arc<str>,
}

/// What a caller asks for.
#[derive(Debug, Clone)]
pub struct Action {
    name: &'static str,
    target: String,
    request: Value,
}

impl Action {
    /// `target` names what it is about, such as `sale 12`; of a creation the parent.
    pub fn new(name: &'static str, target: String) -> Self {
        Self { name, target, request: Value::Object(Map::new()) }
    }

    /// Keeps the values that were asked for.
    #[must_use]
    pub fn with_request(mut self, request: Value) -> Self {
        self.request = request;
        self
    }
}

/// What an action has done: the answer to its caller, and what the audit log keeps of it.
#[derive(Debug, Clone)]
pub struct Outcome<T> {
    pub value: T,
    word: &'static str,
    /// The name of what was created.
    created: Option<String>,
    changes: Vec<Change>,
}

impl<T> Outcome<T> {
    /// Done, with these changes.
    pub const fn done(value: T, changes: Vec<Change>) -> Self {
        Self { value, word: "done", created: None, changes }
    }

    /// Everything was already as requested.
    pub const fn unchanged(value: T) -> Self {
        Self { value, word: "unchanged", created: None, changes: Vec::new() }
    }

    /// `target` was created.
    pub fn created(value: T, target: &impl Auditable) -> Self {
        let new = |(field, to): (&str, Value)| Change::new(field, Value::Null, to);
        let changes = target.fields().into_iter().map(new).collect();
        Self { value, word: "done", created: Some(target.name()), changes }
    }

    /// `before` has become `after`.
    pub fn edited<R: Auditable>(value: T, before: &R, after: &R) -> Self {
        let pairs = before.fields().into_iter().zip(after.fields()).filter(|((_, from), (_, to))| from != to);
        let changes: Vec<_> = pairs.map(|((field, from), (_, to))| Change::new(field, from, to)).collect();
        if changes.is_empty() { Self::unchanged(value) } else { Self::done(value, changes) }
    }

    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Outcome<U> {
        let Self { value, word, created, changes } = self;
        Outcome { value: change(value), word, created, changes }
    }
}

/// The detail of the row with an outcome.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct OutcomeDetail {
    changes: Vec<Change>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn explain(error: &Error) -> String {
    let text = match error {
        Error::Invalid(members) => {
            members.iter().map(|one| format!("{} {}", one.member, one.detail)).collect::<Vec<_>>().join("; ")
        }
        other => describe(other),
    };
    text.chars().take(MAX_ERROR_CHARS).collect()
}

impl Engine {
    /// Carries out `work` for `caller`, unless the audit log cannot be written first.
    pub async fn audited<T>(
        &self,
        caller: &Caller,
        action: Action,
        work: impl Future<Output = Result<Outcome<T>, Error>>,
    ) -> Result<T, Error> {
        let id = self.ids.next()?;
        let asked = AuditRow {
            id,
            action_id: id,
            at: self.clock.now(),
            actor: caller.name.to_string(),
            address: caller.address.to_string(),
            request_id: caller.request_id.to_string(),
            action: action.name.to_owned(),
            target: action.target,
            outcome: "asked".to_owned(),
            detail: action.request.to_string(),
        };
        self.stores.ledger.audit(&asked).await?;
        let done = work.await;
        let (word, created, detail) = match &done {
            Ok(done) => (done.word, done.created.clone(), OutcomeDetail { changes: done.changes.clone(), error: None }),
            Err(error) => {
                (error.code().as_str(), None, OutcomeDetail { changes: Vec::new(), error: Some(explain(error)) })
            }
        };
        let at = self.clock.now();
        let noting = async {
            let (id, target) = (self.ids.next()?, created.unwrap_or_else(|| asked.target.clone()));
            let detail = serde_json::to_string(&detail).map_err(|_| Error::Plain(Code::Internal))?;
            let row = AuditRow { id, at, target, outcome: word.to_owned(), detail, ..asked.clone() };
            Ok::<_, Error>(self.stores.ledger.audit(&row).await?)
        };
        if let Err(error) = noting.await {
            // The change is made and its first audit row exists; the log line has the rest.
            let AuditRow { action_id, actor, action, target, request_id, .. } = &asked;
            tracing::error!(
                action_id,
                actor,
                action,
                target,
                request_id,
                outcome = word,
                ?detail,
                error = describe(&error),
                "the audit log lacks the outcome of an action"
            );
        }
        done.map(|done| done.value)
    }
}
