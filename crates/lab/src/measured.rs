//! The result of a version.

use serde::Serialize;

/// What a version can do wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flaw {
    /// More orders than stock.
    Oversold,
    /// Stock is left although buyers wanted it.
    Undersold,
    /// A person has more than one order.
    Duplicated,
    /// An order that was confirmed does not exist.
    Lost,
    /// Memory or keys that nobody uses any more remain.
    Leaked,
    /// A server behind is asked far more often than necessary.
    Overload,
    /// A value is returned that was replaced.
    Stale,
    /// A person who is logged in is refused.
    LoggedOut,
}

impl Flaw {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Oversold => "oversold",
            Self::Undersold => "undersold",
            Self::Duplicated => "duplicated",
            Self::Lost => "lost",
            Self::Leaked => "leaked",
            Self::Overload => "overload",
            Self::Stale => "stale",
            Self::LoggedOut => "logged-out",
        }
    }
}

/// What was measured and what was found. Counts are the sums over all parts of the run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Measured {
    /// Requests of the load, from which the next four figures are.
    pub requests: u64,
    pub orders_per_s: Option<f64>,
    pub p99_ms: Option<f64>,
    pub sql_per_request: Option<f64>,
    /// Commands that Redis executed, those inside scripts included.
    pub redis_per_request: Option<f64>,
    /// Commands that the version sent, where a script is one; `None` if another crate sent them.
    pub redis_calls_per_request: Option<f64>,
    pub oversold: u64,
    pub undersold: u64,
    pub duplicated: u64,
    /// Confirmed orders that do not exist after a process or a server was killed.
    pub lost: u64,
    /// Entries in memory or keys in Redis that nobody uses any more.
    pub leaked: u64,
    /// Each flaw with the sentence that says what was seen.
    pub flaws: Vec<(Flaw, String)>,
    /// Other figures that belong to this version.
    pub figures: Vec<(&'static str, f64)>,
}

impl Measured {
    /// Notes a flaw if there is any of it.
    pub fn count(&mut self, flaw: Flaw, count: u64, seen: impl FnOnce(u64) -> String) {
        let total = match flaw {
            Flaw::Oversold => &mut self.oversold,
            Flaw::Undersold => &mut self.undersold,
            Flaw::Duplicated => &mut self.duplicated,
            Flaw::Lost => &mut self.lost,
            Flaw::Leaked => &mut self.leaked,
            Flaw::Overload | Flaw::Stale | Flaw::LoggedOut => &mut 0,
        };
        *total += count;
        if count > 0 {
            self.flaws.push((flaw, seen(count)));
        }
    }

    pub fn has(&self, flaw: Flaw) -> bool {
        self.flaws.iter().any(|(found, _)| *found == flaw)
    }
}
