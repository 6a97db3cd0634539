//! What was asked and what was heard: one line an attempt.

use std::io::{BufRead, Write};

use serde::{Deserialize, Serialize};
use stampede_core::{OrderId, SaleId, UserId};

/// What an attempt to buy came to, as its caller heard it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Heard {
    /// 201: a new order.
    Created,
    /// 200: the order that the buyer had already.
    Already,
    /// 202: on its way.
    Pending,
    SoldOut,
    /// Another clear no: not started, ended, paused, no such sale, too many requests, not logged in.
    Refused,
    /// 503: nothing was done, or it is not known; and no answer at all.
    Unknown,
    /// An answer that no buyer should get.
    Wrong,
}

impl Heard {
    pub const ALL: [Self; 7] =
        [Self::Created, Self::Already, Self::Pending, Self::SoldOut, Self::Refused, Self::Unknown, Self::Wrong];

    /// A yes: there must be a row.
    pub const fn is_yes(self) -> bool {
        matches!(self, Self::Created | Self::Already | Self::Pending)
    }

    /// May there be a row after this?
    pub const fn may_have_row(self) -> bool {
        self.is_yes() || matches!(self, Self::Unknown | Self::Wrong)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Already => "already",
            Self::Pending => "pending",
            Self::SoldOut => "sold_out",
            Self::Refused => "refused",
            Self::Unknown => "unknown",
            Self::Wrong => "wrong",
        }
    }
}

/// One attempt of one person at one sale. Times are microseconds of one clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub sale: SaleId,
    pub user: UserId,
    pub start_us: u64,
    pub end_us: u64,
    pub heard: Heard,
    /// With a yes.
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
        let attempt = |heard, order| Attempt {
            sale: SaleId::new(1).unwrap(),
            user: UserId::new(i64::MAX).unwrap(),
            start_us: 5,
            end_us: 6,
            heard,
            order,
        };
        let history = [attempt(Heard::Created, Some(id(3))), attempt(Heard::SoldOut, None)];
        let mut text = Vec::new();
        write(&history, &mut text).unwrap();
        assert_eq!(read(&text[..]).unwrap(), history);
        let told = read(&b"\n{}\n"[..]).unwrap_err().to_string();
        assert!(told.contains("line 2"), "{told}");
    }
}
