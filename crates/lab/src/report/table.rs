//! The table for a terminal: one line of figures per version, and the reason for its verdict below.

use std::fmt;

use super::{count, figure, verdict};
use crate::Family;
use crate::measured::Measured;
use crate::run::{Outcome, VersionResult};

/// Of the column of names.
const NAME_WIDTH: usize = 34;

/// The heads of the columns.
pub fn heads() -> String {
    format!(
        "{:<NAME_WIDTH$} {:<7} {:>8} {:>8} {:>6} {:>6} {:>6} {:>5} {:>5} {:>5} {:>5} {:>6}",
        "version", "result", "orders/s", "p99 ms", "SQL", "Redis", "calls", "over", "under", "dup", "lost", "leaked"
    )
}

/// The two lines of a version.
pub fn lines(result: &VersionResult) -> String {
    let none = Measured::default();
    let measured = result.measured.as_ref().unwrap_or(&none);
    let mut lines = format!(
        "{:<NAME_WIDTH$} {:<7} {:>8} {:>8} {:>6} {:>6} {:>6} {:>5} {:>5} {:>5} {:>5} {:>6}\n    {}",
        result.name,
        verdict(result),
        figure(measured.orders_per_s),
        figure(measured.p99_ms),
        figure(measured.sql_per_request),
        figure(measured.redis_per_request),
        figure(measured.redis_calls_per_request),
        count(measured.oversold),
        count(measured.undersold),
        count(measured.duplicated),
        count(measured.lost),
        count(measured.leaked),
        result.reason,
    );
    for (name, value) in &measured.figures {
        lines.push_str(&format!("\n    {name}: {}", figure(Some(*value))));
    }
    lines
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} buyers, stock {}, seed {}", self.buyers, self.stock, self.seed)?;
        writeln!(
            f,
            "SQL, Redis: statements and commands per request, those in scripts included; calls: round trips to Redis"
        )?;
        for family in Family::ALL {
            let mut results = self.versions.iter().filter(|result| result.family == *family).peekable();
            if results.peek().is_none() {
                continue;
            }
            let (english, chinese) = family.title();
            writeln!(f, "\n{english} · {chinese}\n{}", heads())?;
            for result in results {
                writeln!(f, "{}", lines(result))?;
            }
        }
        let unexpected: Vec<&str> =
            self.versions.iter().filter(|result| !result.as_expected).map(|result| result.name).collect();
        let expected = self.versions.len() - unexpected.len();
        writeln!(f, "\n{expected} of {} versions as expected, in {:.0} s", self.versions.len(), self.seconds)?;
        if !unexpected.is_empty() {
            writeln!(f, "not as expected: {}", unexpected.join(", "))?;
        }
        for kind in &self.missing_servers {
            writeln!(
                f,
                "{} is not installed; on Debian and Ubuntu: sudo apt-get install {}",
                kind.name(),
                kind.package()
            )?;
        }
        Ok(())
    }
}
