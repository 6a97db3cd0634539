//! The history of a run: one line per attempt to buy or to cancel, with its response.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};
use stampede_core::{OrderId, SaleId, UserId};

use crate::http::Reply;

macro_rules! responses {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// The response to an attempt, as the client received it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Response { $($(#[$doc])* $name,)* }

        impl Response {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

responses! {
    /// 201: a new order.
    Created = "created",
    /// 200: the buyer's existing order.
    Already = "already",
    /// 202: accepted, not yet recorded.
    Pending = "pending",
    SoldOut = "sold_out",
    NotStarted = "not_started",
    Ended = "ended",
    Paused = "paused",
    /// The buyer's order has ended, and nobody may buy again.
    BoughtBefore = "bought_before",
    NoSuchSale = "no_such_sale",
    /// 401. Every attempt of a history has a valid session, so this is an error.
    Unauthorized = "unauthorized",
    TooManyRequests = "too_many_requests",
    /// 200 to a cancellation.
    Cancelled = "cancelled",
    /// 409 to a cancellation.
    IllegalStep = "illegal_step",
    /// 404 to a cancellation.
    NoSuchOrder = "no_such_order",
    /// 503 or no response: whether there is an order is not known.
    Unknown = "unknown",
    /// Any other response: an error of the server.
    Wrong = "wrong",
}

impl Response {
    /// Whether the response confirms an order that the buyer did not have before.
    pub const fn is_new_order(self) -> bool {
        matches!(self, Self::Created | Self::Pending)
    }

    /// Whether the response confirms an order, which the ledger must then have.
    pub const fn is_confirmation(self) -> bool {
        matches!(self, Self::Created | Self::Already | Self::Pending)
    }

    /// Whether the gate refused. A buyer who has an order never gets such a response.
    pub const fn is_gate_refusal(self) -> bool {
        match self {
            Self::SoldOut | Self::NotStarted | Self::Ended | Self::Paused => true,
            // A draft is not shown to anyone.
            Self::NoSuchSale => false,
            // The gate knows the order; the ledger refused.
            Self::BoughtBefore => false,
            Self::Created | Self::Already | Self::Pending | Self::Cancelled => false,
            Self::Unauthorized | Self::TooManyRequests | Self::IllegalStep | Self::NoSuchOrder => false,
            Self::Unknown | Self::Wrong => false,
        }
    }

    /// Whether the ledger may have an order after this response.
    pub const fn may_have_created(self) -> bool {
        self.is_confirmation() || matches!(self, Self::Unknown | Self::Wrong)
    }

    /// Classifies the reply to an attempt.
    pub fn of(action: Action, reply: &Reply) -> Self {
        match (action, reply.status.as_u16()) {
            (Action::Buy, 201) => Self::Created,
            (Action::Buy, 200) => Self::Already,
            (Action::Buy, 202) => Self::Pending,
            (Action::Cancel, 200) => Self::Cancelled,
            (_, 503) => Self::Unknown,
            _ => Self::refusal(&reply.text("code")).unwrap_or(Self::Wrong),
        }
    }

    /// The refusal with this code, if an attempt can end with it.
    pub fn refusal(code: &str) -> Option<Self> {
        let refusals = [
            Self::SoldOut,
            Self::NotStarted,
            Self::Ended,
            Self::Paused,
            Self::BoughtBefore,
            Self::NoSuchSale,
            Self::Unauthorized,
            Self::TooManyRequests,
            Self::IllegalStep,
            Self::NoSuchOrder,
        ];
        refusals.into_iter().find(|response| response.as_str() == code)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    #[default]
    Buy,
    Cancel,
}

impl Action {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
    fn is_buy(&self) -> bool {
        *self == Self::Buy
    }
}

/// One attempt of one user at one sale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    #[serde(skip_serializing_if = "Action::is_buy", default)]
    pub action: Action,
    pub sale: SaleId,
    pub user: UserId,
    /// Microseconds since the Unix epoch, by a monotonic clock.
    pub start_us: u64,
    pub end_us: u64,
    pub response: Response,
    /// The order that a confirmation names, or that is to be cancelled.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub order: Option<OrderId>,
}

#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error("the history cannot be read or written")]
    Io(#[from] std::io::Error),
    #[error("line {line} of the history is not an attempt")]
    Line { line: usize, source: serde_json::Error },
}

/// Writes one JSON object per line.
pub fn write(history: &[Attempt], mut to: impl Write) -> Result<(), HistoryError> {
    for attempt in history {
        serde_json::to_writer(&mut to, attempt).map_err(std::io::Error::from)?;
        to.write_all(b"\n")?;
    }
    Ok(to.flush()?)
}

pub fn read(from: impl BufRead) -> Result<Vec<Attempt>, HistoryError> {
    let mut history = Vec::new();
    for (line, text) in (1..).zip(from.lines()) {
        let text = text?;
        if !text.trim().is_empty() {
            history.push(serde_json::from_str(&text).map_err(|source| HistoryError::Line { line, source })?);
        }
    }
    Ok(history)
}

#[cfg(test)]
mod tests {
    use stampede_core::Code;

    use super::*;

    #[test]
    fn written_history_is_read_back() {
        let id = |n| OrderId::new(n).unwrap();
        let attempt = |action, response, order| Attempt {
            action,
            sale: SaleId::new(1).unwrap(),
            user: UserId::new(i64::MAX).unwrap(),
            start_us: 5,
            end_us: 6,
            response,
            order,
        };
        let history = [
            attempt(Action::Buy, Response::Created, Some(id(3))),
            attempt(Action::Buy, Response::SoldOut, None),
            attempt(Action::Cancel, Response::Cancelled, Some(id(3))),
        ];
        let mut text = Vec::new();
        write(&history, &mut text).unwrap();
        assert_eq!(read(&text[..]).unwrap(), history);
        let error = read(&b"\n{}\n"[..]).unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
    }

    /// A new reason for a refusal needs a response here; without one it would count as an error of the server.
    #[test]
    fn every_refusal_of_buying_has_a_response() {
        // The load generator sends valid requests, and these are errors of the server. 503 is `Unknown`.
        let wrong = [Code::InvalidRequest, Code::Internal];
        for code in Code::ALL.iter().filter(|code| code.refuses_buying() && code.http_status() != 503) {
            assert_eq!(Response::refusal(code.as_str()).is_none(), wrong.contains(code), "{code:?}");
        }
    }

    #[test]
    fn response_is_serialized_as_its_name() {
        for response in Response::ALL {
            assert_eq!(serde_json::to_value(response).unwrap(), response.as_str());
        }
        assert_eq!(Response::refusal("paused"), Some(Response::Paused));
        assert_eq!(Response::refusal("created"), None);
    }
}
