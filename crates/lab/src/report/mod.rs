//! A run as text, JSON and an HTML page.
//!
//! - [`table`]: the table for a terminal
//! - [`html`]: one self-contained page; [`svg`]: its charts
//! - [`markdown`]: the tables of `docs/lab.md`

pub mod html;
pub mod markdown;
pub mod svg;
pub mod table;

use crate::run::{Verdict, VersionResult};

/// The verdict in one word, and whether it is the expected one.
pub fn verdict(result: &VersionResult) -> &'static str {
    match (result.verdict, result.as_expected) {
        (Verdict::Held, Some(true)) => "holds",
        (Verdict::Failed, Some(true)) => "fails",
        (Verdict::Held, _) => "HOLDS?",
        (Verdict::Failed, _) => "FAILS!",
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

/// A count; a dash if it was not made.
pub fn count(value: Option<u64>) -> String {
    value.map_or_else(|| "–".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::Measured;
    use crate::registry;
    use crate::run::Outcome;

    /// A run of one version with a different figure in each column.
    fn outcome() -> Outcome {
        let version = registry::all().next().unwrap();
        let measured = Measured {
            orders_per_s: Some(101.0),
            p99_ms: Some(102.0),
            sql_per_request: Some(103.0),
            redis_per_request: Some(104.0),
            redis_calls_per_request: Some(105.0),
            oversold: Some(106),
            undersold: Some(107),
            duplicated: Some(108),
            lost: Some(109),
            leaked: Some(110),
            ..Measured::default()
        };
        let result = VersionResult {
            name: version.name,
            family: version.family,
            title: version.title(),
            expected: "oversold",
            verdict: Verdict::Failed,
            as_expected: Some(true),
            reason: "a reason".to_owned(),
            seconds: 1.0,
            measured: Some(measured),
        };
        Outcome {
            seed: 1,
            buyers: 16,
            stock: 8,
            processors: 2,
            debug_build: true,
            seconds: 1.0,
            versions: vec![result],
            missing_servers: Vec::new(),
        }
    }

    #[test]
    fn each_figure_of_the_terminal_table_is_below_its_head() {
        let (outcome, heads) = (outcome(), table::heads());
        let text = outcome.to_string();
        assert_eq!(text.matches(&heads).count(), 1, "{text}");
        let row = text.lines().find(|line| line.starts_with(outcome.versions[0].name)).unwrap();
        let end = |line: &str, part: &str| line.find(part).map(|begin| begin + part.len());
        let columns =
            ["orders/s", "p99 ms", "SQL", "Redis", "calls", "over", "under", "dup", "lost", "leaked"].iter().zip(101..);
        for (head, figure) in columns {
            let ends = (end(&heads, head), end(row, &figure.to_string()));
            assert!(ends.0.is_some() && ends.0 == ends.1, "{head}: {ends:?}\n{heads}\n{row}");
        }
    }

    #[test]
    fn the_figures_of_the_page_are_in_the_order_of_their_heads() {
        let page = html::page(&outcome());
        let heads = "<tr><th>version<th>result<th>orders/s<th>p99 ms<th>SQL<th>Redis<th>calls\
            <th>oversold<th>undersold<th>duplicated<th>lost<th>leaked<th>reason</tr>";
        assert_eq!(page.matches(heads).count(), 1, "{page}");
        let figures: String = (101..=110).map(|figure| format!("<td class=\"n\">{figure}")).collect();
        assert_eq!(page.matches(&format!("{figures}<td>a reason</tr>")).count(), 1, "{page}");
    }

    #[test]
    fn none_is_not_the_same_as_not_counted() {
        assert_eq!([None, Some(0), Some(2)].map(count), ["–", "0", "2"]);
    }

    #[test]
    fn figures_have_as_many_decimals_as_they_need() {
        let shown: Vec<String> = [None, Some(0.004), Some(12.34), Some(1234.5)].map(figure).into();
        assert_eq!(shown, ["–", "0.00", "12.3", "1234"]);
    }
}
