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
    /// What the servers and the answers say does not agree, in another way than these.
    Inconsistent,
}

impl Flaw {
    pub const ALL: &[Self] = &[
        Self::Oversold,
        Self::Undersold,
        Self::Duplicated,
        Self::Lost,
        Self::Leaked,
        Self::Overload,
        Self::Stale,
        Self::LoggedOut,
        Self::Inconsistent,
    ];

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
            Self::Inconsistent => "inconsistent",
        }
    }
}

/// What was measured and what was found. Counts are the sums over all parts of the run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Measured {
    /// Requests of the load, from which the next five figures are. In the tiers, statements and commands are those of a further load. In the
    /// family sold-out, the load is the refusals, and the orders are those of the sale before it.
    pub requests: u64,
    pub orders_per_s: Option<f64>,
    pub p99_ms: Option<f64>,
    pub sql_per_request: Option<f64>,
    /// Commands that Redis executed, those inside scripts included.
    pub redis_per_request: Option<f64>,
    /// Commands that the version sent, where a script is one; `None` if another crate sent them.
    pub redis_calls_per_request: Option<f64>,
    /// `None` if the version does not sell, or nothing compares that with the stock or the buyers.
    pub oversold: Option<u64>,
    pub undersold: Option<u64>,
    pub duplicated: Option<u64>,
    /// Confirmed orders that do not exist. `None` if nothing was killed and none is missing: how the version stands a crash is not known.
    pub lost: Option<u64>,
    /// Entries in memory or keys in Redis that nobody uses any more. `None` if none were looked for: the version keeps neither.
    pub leaked: Option<u64>,
    /// Each flaw with the sentence that says what was seen.
    pub flaws: Vec<(Flaw, String)>,
    /// Other figures that belong to this version.
    pub figures: Vec<(&'static str, f64)>,
}

impl Measured {
    /// Notes a flaw if there is any of it.
    pub fn count(&mut self, flaw: Flaw, count: u64, seen: impl FnOnce(u64) -> String) {
        let total = match flaw {
            Flaw::Oversold => self.oversold.get_or_insert_default(),
            Flaw::Undersold => self.undersold.get_or_insert_default(),
            Flaw::Duplicated => self.duplicated.get_or_insert_default(),
            Flaw::Lost if count == 0 => &mut 0,
            Flaw::Lost => self.lost.get_or_insert_default(),
            Flaw::Leaked => self.leaked.get_or_insert_default(),
            Flaw::Overload | Flaw::Stale | Flaw::LoggedOut | Flaw::Inconsistent => &mut 0,
        };
        *total += count;
        if count > 0 {
            self.flaws.push((flaw, seen(count)));
        }
    }

    /// Notes that a node or a server was killed while it had orders: none is lost, unless some are counted.
    pub fn killed(&mut self) {
        self.lost.get_or_insert_default();
    }

    pub fn has(&self, flaw: Flaw) -> bool {
        self.flaws.iter().any(|(found, _)| *found == flaw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_looked_for_is_not_zero() {
        let seen = |count| format!("{count} lost");
        let mut measured = Measured::default();
        measured.count(Flaw::Lost, 0, seen);
        assert_eq!(measured.lost, None);
        measured.killed();
        measured.count(Flaw::Lost, 0, seen);
        assert_eq!((measured.lost, measured.has(Flaw::Lost)), (Some(0), false));
        measured.count(Flaw::Lost, 3, seen);
        measured.killed();
        assert_eq!((measured.lost, measured.has(Flaw::Lost)), (Some(3), true));
        let of = |measured: &Measured| [measured.oversold, measured.undersold, measured.duplicated, measured.leaked];
        assert_eq!(of(&measured), [None; 4]);
        for flaw in [Flaw::Oversold, Flaw::Undersold, Flaw::Duplicated, Flaw::Leaked] {
            measured.count(flaw, 0, seen);
            assert!(!measured.has(flaw), "{measured:?}");
        }
        assert_eq!(of(&measured), [Some(0); 4]);
        let mut without_crash = Measured::default();
        without_crash.count(Flaw::Lost, 2, seen);
        assert_eq!(without_crash.lost, Some(2));
    }
}
