//! Charts, written by hand: horizontal bars.

use std::fmt::Write as _;

use super::figure;

const LABEL_WIDTH: f64 = 250.0;
const BAR_WIDTH: f64 = 420.0;
const ROW: f64 = 22.0;
/// Readable on white and on black.
const INK: &str = "#808080";

/// One bar.
#[derive(Debug)]
pub struct Bar<'a> {
    pub label: &'a str,
    pub value: f64,
    /// Whether the version is flawed, which gives the bar another colour.
    pub flawed: bool,
}

/// A chart with one bar below another. The longest bar has the full width.
pub fn bars(title: &str, bars: &[Bar<'_>]) -> String {
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    #[expect(clippy::cast_precision_loss, reason = "a number of rows")]
    let height = ROW.mul_add(bars.len() as f64, 34.0);
    let width = LABEL_WIDTH + BAR_WIDTH + 70.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" role=\"img\" aria-label=\"{title}\">\n\
         <text x=\"0\" y=\"16\" font-weight=\"600\" fill=\"{INK}\">{title}</text>\n"
    );
    for (row, bar) in bars.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a number of rows")]
        let top = ROW.mul_add(row as f64, 28.0);
        let (length, middle) = (BAR_WIDTH * bar.value / longest, top + 13.0);
        let colour = if bar.flawed { "#c2542d" } else { "#2a7d4f" };
        let (label_end, bar_end) = (LABEL_WIDTH - 8.0, LABEL_WIDTH + length + 6.0);
        let (label, value) = (bar.label, figure(Some(bar.value)));
        // Writing to a string does not fail.
        let _ = writeln!(
            svg,
            "<text x=\"{label_end}\" y=\"{middle}\" text-anchor=\"end\" fill=\"{INK}\">{label}</text>\
             <rect x=\"{LABEL_WIDTH}\" y=\"{top}\" width=\"{length:.1}\" height=\"16\" fill=\"{colour}\"/>\
             <text x=\"{bar_end:.1}\" y=\"{middle}\" fill=\"{INK}\">{value}</text>"
        );
    }
    svg.push_str("</svg>\n");
    svg
}
