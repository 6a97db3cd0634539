//! A run as text, JSON and an HTML page.
//!
//! - [`table`]: the table for a terminal
//! - [`html`]: one self-contained page; [`svg`]: its charts

pub mod html;
pub mod svg;
pub mod table;

use crate::run::{Verdict, VersionResult};

/// The verdict in one word, and whether it is the expected one.
pub fn verdict(result: &VersionResult) -> &'static str {
    match (result.verdict, result.as_expected) {
        (Verdict::Held, true) => "holds",
        (Verdict::Failed, true) => "fails",
        (Verdict::Held, false) => "HOLDS?",
        (Verdict::Failed, false) => "FAILS!",
        (Verdict::Skipped, _) => "skipped",
        (Verdict::Error, _) => "ERROR",
    }
}

/// A figure with as many decimals as it needs; a dash if there is none.
pub fn figure(value: Option<f64>) -> String {
    match value {
        None => "–".to_owned(),
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}

/// A count; a dash if it is zero, so that what went wrong stands out.
pub fn count(value: u64) -> String {
    if value == 0 { "–".to_owned() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_as_many_decimals_as_they_need() {
        let shown: Vec<String> = [None, Some(0.004), Some(12.34), Some(1234.5)].map(figure).into();
        assert_eq!(shown, ["–", "0.00", "12.3", "1234"]);
    }
}
