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
            "SQL, Redis: statements and commands per request, those in scripts included; calls: round trips to Redis, not counted if another crate \
             sends them; over, under: orders beyond the stock, stock that is left; dup: orders beyond one per person; lost: confirmed orders that do not exist, 0 if a crash has lost none; \
             leaked: entries and keys that are left; –: not measured, or not looked for"
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
        writeln!(f, "\n{}", self.summary())?;
        let unexpected: Vec<&str> = self.unexpected().map(|result| result.name).collect();
        if !unexpected.is_empty() {
            writeln!(f, "not as expected: {}", unexpected.join(", "))?;
        }
        if let Some(missing) = self.missing() {
            writeln!(f, "{missing}")?;
        }
        Ok(())
    }
}
