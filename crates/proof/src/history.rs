//! What was sent and what was answered: one line per attempt to buy or to cancel.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};
use stampede_core::{OrderId, SaleId, UserId};

macro_rules! answers {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// How an attempt was answered, as its caller saw it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Heard { $($(#[$doc])* $name,)* }

        impl Heard {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

answers! {
    /// 201: a new order.
    Created = "created",
    /// 200: the order that the buyer had already.
    Already = "already",
    /// 202: on its way.
    Pending = "pending",
    SoldOut = "sold_out",
    NotStarted = "not_started",
    Ended = "ended",
    Paused = "paused",
    NoSuchSale = "no_such_sale",
    /// 401. A history has only attempts of users who are logged in.
    Unauthorized = "unauthorized",
    TooManyRequests = "too_many_requests",
    /// 200 to a cancellation.
    Cancelled = "cancelled",
    /// 409 to a cancellation.
    IllegalStep = "illegal_step",
    /// 404 to a cancellation.
    NoSuchOrder = "no_such_order",
    /// 503: nothing was done, or it is not known; or no answer at all.
    Unknown = "unknown",
    /// An answer that no buyer should get.
    Wrong = "wrong",
}

impl Heard {
    /// A yes to an attempt to buy: there must be a row.
    pub const fn is_yes(self) -> bool {
        matches!(self, Self::Created | Self::Already | Self::Pending)
    }

    /// May there be a row after this?
    pub const fn may_have_row(self) -> bool {
        self.is_yes() || matches!(self, Self::Unknown | Self::Wrong)
    }

    /// The refusal of this code, if it is one that an attempt can end with.
    pub fn refusal(code: &str) -> Option<Self> {
        let refusals = [
            Self::SoldOut,
            Self::NotStarted,
            Self::Ended,
            Self::Paused,
            Self::NoSuchSale,
            Self::Unauthorized,
            Self::TooManyRequests,
            Self::IllegalStep,
            Self::NoSuchOrder,
        ];
        refusals.into_iter().find(|heard| heard.as_str() == code)
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
    /// Microseconds since 1970, by a clock that never goes back during the run.
    pub start_us: u64,
    pub end_us: u64,
    pub heard: Heard,
    /// The order that a yes names, or that is to be cancelled.
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

/// One JSON object a line.
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
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let id = |n| OrderId::new(n).unwrap();
        let attempt = |action, heard, order| Attempt {
            action,
            sale: SaleId::new(1).unwrap(),
            user: UserId::new(i64::MAX).unwrap(),
            start_us: 5,
            end_us: 6,
            heard,
            order,
        };
        let history = [
            attempt(Action::Buy, Heard::Created, Some(id(3))),
            attempt(Action::Buy, Heard::SoldOut, None),
            attempt(Action::Cancel, Heard::Cancelled, Some(id(3))),
        ];
        let mut text = Vec::new();
        write(&history, &mut text).unwrap();
        assert_eq!(read(&text[..]).unwrap(), history);
        let told = read(&b"\n{}\n"[..]).unwrap_err().to_string();
        assert!(told.contains("line 2"), "{told}");
    }

    #[test]
    fn an_answer_is_written_as_its_name() {
        for heard in Heard::ALL {
            assert_eq!(serde_json::to_value(heard).unwrap(), heard.as_str());
        }
        assert_eq!(Heard::refusal("paused"), Some(Heard::Paused));
        assert_eq!(Heard::refusal("created"), None);
    }
}
