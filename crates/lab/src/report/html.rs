//! One self-contained page: charts, the table, and each version's source beside its result.

use std::fmt::Write as _;

use super::svg::{Bar, bars};
use super::{count, figure, verdict};
use crate::measured::Measured;
use crate::registry;
use crate::run::{Outcome, Verdict, VersionResult};
use crate::{Expected, Family, Version};

const STYLE: &str = include_str!("page.css");

type Figure = fn(&Measured) -> Option<f64>;

/// What is charted for each family.
const CHARTS: &[(&str, Figure)] = &[
    ("orders per second", |measured| measured.orders_per_s),
    ("p99 in ms", |measured| measured.p99_ms),
    ("SQL statements per request", |measured| measured.sql_per_request),
    ("Redis commands per request", |measured| measured.redis_per_request),
];

/// The whole page.
pub fn page(outcome: &Outcome) -> String {
    let mut body = String::new();
    for family in Family::ALL {
        let results: Vec<&VersionResult> = outcome.versions.iter().filter(|result| result.family == *family).collect();
        if results.is_empty() {
            continue;
        }
        let (english, chinese) = family.title();
        // Writing to a string does not fail, here and below.
        let _ = write!(body, "<section><h2>{english} · {chinese}</h2>\n{}", summary(&results));
        body.push_str("<div class=\"charts\">\n");
        for (title, value) in CHARTS {
            body.push_str(&chart(title, &results, *value));
        }
        body.push_str("</div>\n");
        for result in results {
            body.push_str(&details(result));
        }
        body.push_str("</section>\n");
    }
    let missing = outcome.missing().map(|missing| format!("<p>{missing}</p>\n")).unwrap_or_default();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>stampede lab</title>\n\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>\n\
         <h1>stampede lab</h1>\n<p>{} buyers, stock {}, seed {}: {}. \
         Figures per request include statements and commands of background tasks, and commands inside scripts; \
         a call is one round trip to Redis, not counted where another crate sends it. \
         Lost: confirmed orders that do not exist, 0 if a crash has lost none. A dash: none, or not measured.</p>\n{missing}{body}</body></html>\n",
        outcome.buyers,
        outcome.stock,
        outcome.seed,
        outcome.summary(),
    )
}

fn version(result: &VersionResult) -> Option<&'static Version> {
    registry::all().find(|version| version.name == result.name)
}

fn chart(title: &str, results: &[&VersionResult], value: Figure) -> String {
    let of = |result: &&'_ VersionResult| Some((result.name, value(result.measured.as_ref()?)?, result.expected));
    let values: Vec<_> = results.iter().filter_map(of).collect();
    if values.is_empty() {
        return String::new();
    }
    let bar = |(name, value, expected): &(&'static str, f64, &str)| Bar {
        label: name.split_once('/').map_or(*name, |(_, name)| name),
        value: *value,
        flawed: *expected != "sound",
    };
    bars(title, &values.iter().map(bar).collect::<Vec<_>>())
}

fn summary(results: &[&VersionResult]) -> String {
    let mut table = "<table><tr><th>version<th>result<th>orders/s<th>p99 ms<th>SQL<th>Redis<th>calls<th>oversold\
        <th>undersold<th>duplicated<th>lost<th>leaked<th>reason</tr>\n"
        .to_owned();
    let none = Measured::default();
    for result in results {
        let measured = result.measured.as_ref().unwrap_or(&none);
        let _ = write!(table, "<tr><td><a href=\"#{0}\">{0}</a><td class=\"{1}\">{1}", result.name, class(result));
        for value in [
            measured.orders_per_s,
            measured.p99_ms,
            measured.sql_per_request,
            measured.redis_per_request,
            measured.redis_calls_per_request,
        ] {
            let _ = write!(table, "<td class=\"n\">{}", figure(value));
        }
        for counted in [measured.oversold, measured.undersold, measured.duplicated, measured.lost, measured.leaked] {
            let _ = write!(table, "<td class=\"n\">{}", count(counted));
        }
        let _ = writeln!(table, "<td>{}</tr>", escape(&result.reason));
    }
    table.push_str("</table>\n");
    table
}

fn class(result: &VersionResult) -> &'static str {
    match (result.as_expected, result.verdict) {
        (Some(true), Verdict::Held) => "holds",
        (Some(true), _) => "fails",
        (None, _) => "skipped",
        (Some(false), _) => "unexpected",
    }
}

fn details(result: &VersionResult) -> String {
    let Some(version) = version(result) else { return String::new() };
    let expected = match version.expected {
        Expected::Sound => "expected to hold".to_owned(),
        Expected::Flawed(flaw) => format!("expected to fail: {}", flaw.name()),
    };
    let figures: String = result
        .measured
        .iter()
        .flat_map(|measured| &measured.figures)
        .fold(String::new(), |text, (name, value)| format!("{text}<br>{}: {}", escape(name), figure(Some(*value))));
    format!(
        "<details id=\"{name}\"><summary>{name}: <b class=\"{class}\">{verdict}</b> ({expected})</summary>\n\
         <div class=\"beside\"><div><p>{reason}{figures}</p><pre class=\"story\">{story}</pre>\
         <pre class=\"story\" lang=\"zh\">{chinese}</pre></div><pre><code>{source}</code></pre></div></details>\n",
        name = result.name,
        class = class(result),
        verdict = verdict(result),
        reason = escape(&result.reason),
        story = escape(&version.story()),
        chinese = escape(version.story_zh),
        source = escape(version.source),
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("a < b && c > d"), "a &lt; b &amp;&amp; c &gt; d");
    }
}
