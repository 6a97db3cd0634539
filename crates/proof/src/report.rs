//! The report of a benchmark: a table, stable JSON, a page with plots.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use hdrhistogram::Histogram;
use serde::Serialize;
use stampede_core::SaleId;

use crate::check::Line;
use crate::generator::Sample;
use crate::history::Response;

/// The results of a run. The JSON is stable: members are added, never changed.
#[derive(Debug, Serialize)]
pub struct Report {
    pub tier: String,
    pub connections: usize,
    pub nodes: usize,
    pub orders: Measured,
    pub refusals: Measured,
    pub noop: Noop,
    pub storm: Storm,
    pub latency_ms: Latencies,
    /// Each kind of response to an attempt to buy, by phase.
    pub responses: Vec<ResponseLatency>,
    pub batch: Batch,
    /// Null in a tier without a queue.
    pub messages: Option<Messages>,
    /// Null if it was not measured.
    pub drain: Option<Drain>,
    /// Of the largest node; null if the nodes were not started by this process.
    pub peak_rss_bytes: Option<u64>,
    /// The fraction of processor time that other guests of the host used; null where it cannot be read.
    pub steal: Option<f64>,
    pub seed: u64,
    /// Requests per second in open loop; null in closed loop.
    pub rate: Option<f64>,
    pub checks: Vec<Line>,
    pub violations: Vec<Violation>,
    /// Why the figures do not show what the system can do; null if they do.
    pub distorted: Option<String>,
    #[serde(skip)]
    pub timeline: Timeline,
}

/// One kind of response.
#[derive(Debug, Serialize)]
pub struct Measured {
    pub count: usize,
    pub per_s: f64,
    /// The rate divided by the rate of the no-op in the same rounds.
    pub vs_noop: f64,
    /// Processor time of the servers per response, in microseconds; null if the nodes were not started by this process.
    pub cpu_us: Option<f64>,
    /// Responses of other kinds in the same slices.
    pub other: usize,
}

#[derive(Debug, Serialize)]
pub struct Noop {
    pub count: usize,
    pub per_s: f64,
    pub cpu_us: Option<f64>,
}

/// The verification of the storm: the responses compared with the ledger.
#[derive(Debug, Default, Serialize)]
pub struct Storm {
    pub buyers: usize,
    pub stock: usize,
    pub tries: usize,
    pub sold: usize,
    /// Cancelled during the storm and sold again.
    pub returned: usize,
    /// Orders confirmed before the nodes were killed, and orders for which the request was sent after that; null without a kill.
    pub before_kill: Option<usize>,
    pub after_kill: Option<usize>,
    pub oversold: usize,
    pub undersold: usize,
    pub duplicated: usize,
    pub lost: usize,
    pub unexpected: usize,
}

impl Storm {
    /// `all_tried`: no buyer was refused for another reason than the stock, so nothing may be left.
    pub fn violations(&self, all_tried: bool) -> Vec<Violation> {
        use ViolationKind::{Duplicated, Lost, Other, Oversold, Undersold};
        let all = [
            (Oversold, "oversold", self.oversold),
            (Undersold, "undersold", if all_tried { self.undersold } else { 0 }),
            (Duplicated, "duplicated", self.duplicated),
            (Lost, "lost", self.lost),
            (Other, "unexpected", self.unexpected),
        ];
        let found = all.iter().filter(|(.., count)| *count > 0);
        found.map(|(kind, name, count)| Violation::new(*kind, format!("storm: {count} {name}"))).collect()
    }
}

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViolationKind {
    Oversold,
    Undersold,
    Duplicated,
    Lost,
    Other,
}

/// Something that must not happen. Serialized as its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct Violation {
    pub kind: ViolationKind,
    pub text: String,
}

impl Violation {
    pub const fn new(kind: ViolationKind, text: String) -> Self {
        Self { kind, text }
    }
}

impl From<Violation> for String {
    fn from(violation: Violation) -> Self {
        violation.text
    }
}

impl From<&Line> for Violation {
    fn from(line: &Line) -> Self {
        let kind = match line.invariant {
            2 => ViolationKind::Oversold,
            3 => ViolationKind::Duplicated,
            4 => ViolationKind::Lost,
            _ => ViolationKind::Other,
        };
        Self::new(kind, line.to_string())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[derive(Debug, Serialize)]
pub struct Latencies {
    pub order: Quantiles,
    pub refusal: Quantiles,
}

/// One kind of response in one phase.
#[derive(Debug, Serialize)]
pub struct ResponseLatency {
    pub phase: &'static str,
    pub response: &'static str,
    pub count: usize,
    pub latency_ms: Quantiles,
}

impl ResponseLatency {
    /// One entry for every kind of response that occurred.
    pub fn of(phase: &'static str, samples: &[Sample]) -> Vec<Self> {
        let of = |&kind: &Response| {
            let count = samples.iter().filter(|sample| sample.response == kind).count();
            let latency = || Quantiles::of(samples, kind);
            (count > 0).then(|| Self { phase, response: kind.as_str(), count, latency_ms: latency() })
        };
        Response::ALL.iter().filter_map(of).collect()
    }
}

/// Why responses to attempts to buy do not show what the system can do: more than one in a thousand is a refusal by a rate limit.
pub(crate) fn distorted_by_limits(responses: &[ResponseLatency]) -> Option<String> {
    let of_limits = responses.iter().filter(|line| line.response == Response::TooManyRequests.as_str());
    let (limited, all): (usize, usize) =
        (of_limits.map(|line| line.count).sum(), responses.iter().map(|line| line.count).sum());
    (limited * 1000 > all).then(|| {
        format!(
            "{limited} of {all} attempts to buy were refused by rate limits of the target (429), so the figures do not show what it can \
             do. Raise buy.per_user and buy.per_address there, for example with STAMPEDE__BUY__PER_USER__COUNT=1000000 and \
             STAMPEDE__BUY__PER_ADDRESS__COUNT=1000000000"
        )
    })
}

/// In milliseconds. In open loop from the scheduled time of the request.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
}

fn histogram<'a>(samples: impl Iterator<Item = &'a Sample>) -> Option<Histogram<u64>> {
    // Up to a minute, with three significant digits.
    let mut histogram = Histogram::<u64>::new_with_bounds(1, 60_000_000, 3).ok()?;
    for sample in samples {
        histogram.saturating_record(sample.end_us.saturating_sub(sample.due_us).max(1));
    }
    Some(histogram)
}

#[expect(clippy::cast_precision_loss, reason = "microseconds of at most a minute")]
fn ms(histogram: &Histogram<u64>, quantile: f64) -> f64 {
    if histogram.is_empty() { 0.0 } else { histogram.value_at_quantile(quantile) as f64 / 1000.0 }
}

impl Quantiles {
    pub fn of(samples: &[Sample], kind: Response) -> Self {
        let Some(histogram) = histogram(samples.iter().filter(|sample| sample.response == kind)) else {
            return Self::default();
        };
        Self { p50: ms(&histogram, 0.5), p99: ms(&histogram, 0.99), p999: ms(&histogram, 0.999) }
    }
}

/// Sizes of the recorded batches, as upper bounds of the server's histogram; null if there were none.
#[derive(Debug, Default, Serialize)]
pub struct Batch {
    pub p50: Option<f64>,
    pub max: Option<f64>,
}

impl Batch {
    /// From the difference between two histograms.
    pub fn of(before: &[(f64, u64)], after: &[(f64, u64)]) -> Self {
        let earlier = |bound: f64| {
            before.iter().find(|(other, _)| other.total_cmp(&bound).is_eq()).map_or(0, |(_, count)| *count)
        };
        let grown: Vec<(f64, u64)> =
            after.iter().map(|&(bound, count)| (bound, count.saturating_sub(earlier(bound)))).collect();
        let all = grown.last().map_or(0, |(_, count)| *count);
        let reaches = |part: u64| {
            let found = grown.iter().find(|(_, count)| *count >= part.max(1)).map(|(bound, _)| *bound);
            found.filter(|_| all > 0).filter(|bound| bound.is_finite())
        };
        Self { p50: reaches(all.div_ceil(2)), max: reaches(all) }
    }
}

/// What the queue got while orders were measured, from all nodes. With Redis Streams a message is an entry of an outbox.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Messages {
    pub messages: u64,
    pub orders: u64,
    /// Null without an order.
    pub per_order: Option<f64>,
}

impl Messages {
    /// From the counts of messages and orders before and after.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn of(before: (u64, u64), after: (u64, u64)) -> Self {
        let (messages, orders) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        Self { messages, orders, per_order: (orders > 0).then(|| messages as f64 / orders as f64) }
    }
}

/// How fast one consumer has recorded the orders that waited in the queue, against raw inserts of the same rows.
#[derive(Debug, Serialize)]
pub struct Drain {
    pub orders: usize,
    pub per_s: f64,
    /// Orders in a transaction of the consumer, on average. The raw inserts have as many.
    pub batch: f64,
    /// Null if it was not measured.
    pub raw_per_s: Option<f64>,
    pub vs_raw: Option<f64>,
    #[serde(skip)]
    pub sales: Vec<SaleId>,
}

impl Drain {
    /// Adds the result of raw inserts.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    pub fn compare(&mut self, rows: usize, elapsed: std::time::Duration) {
        let raw_per_s = rows as f64 / elapsed.as_secs_f64().max(f64::EPSILON);
        self.raw_per_s = Some(raw_per_s);
        self.vs_raw = (rows > 0).then(|| self.per_s / raw_per_s);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = |cpu: Option<f64>| cpu.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
        writeln!(f, "tier {}, {} node(s), {} connections", self.tier, self.nodes, self.connections)?;
        writeln!(f)?;
        writeln!(
            f,
            "{:<10}{:>10}{:>12}{:>10}{:>10}{:>9}{:>9}{:>9}",
            "", "count", "per second", "vs no-op", "CPU µs", "p50 ms", "p99 ms", "p999 ms"
        )?;
        let rows =
            [("orders", &self.orders, self.latency_ms.order), ("refusals", &self.refusals, self.latency_ms.refusal)];
        for (name, measured, latency) in rows {
            let Measured { count, per_s, vs_noop, cpu_us, .. } = measured;
            let Quantiles { p50, p99, p999 } = latency;
            writeln!(
                f,
                "{name:<10}{count:>10}{per_s:>12.0}{vs_noop:>10.2}{:>10}{p50:>9.2}{p99:>9.2}{p999:>9.2}",
                cpu(*cpu_us)
            )?;
        }
        let Noop { count, per_s, cpu_us } = &self.noop;
        writeln!(f, "{:<10}{count:>10}{per_s:>12.0}{:>10}{:>10}", "no-op", "1.00", cpu(*cpu_us))?;
        writeln!(f)?;
        writeln!(f, "{:<10}{:<18}{:>10}{:>29}{:>9}{:>9}", "phase", "response", "count", "p50 ms", "p99 ms", "p999 ms")?;
        for ResponseLatency { phase, response, count, latency_ms } in &self.responses {
            let Quantiles { p50, p99, p999 } = latency_ms;
            writeln!(f, "{phase:<10}{response:<18}{count:>10}{p50:>29.2}{p99:>9.2}{p999:>9.2}")?;
        }
        writeln!(f)?;
        let size = |size: Option<f64>| size.map_or_else(|| "-".to_owned(), |size| format!("{size:.0}"));
        let memory = self.peak_rss_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        let steal = self.steal.map_or_else(|| "-".to_owned(), |steal| format!("{:.1} %", steal * 100.0));
        writeln!(
            f,
            "batches: half at most {}, largest at most {}; peak memory {memory}; CPU stolen {steal}",
            size(self.batch.p50),
            size(self.batch.max)
        )?;
        if let Some(Messages { messages, orders, per_order: Some(per_order) }) = self.messages {
            writeln!(f, "queue: {messages} messages for {orders} orders, {per_order:.3} per order")?;
        }
        if let Some(Drain { orders, per_s, batch, raw_per_s, vs_raw, .. }) = &self.drain {
            write!(f, "drain: {orders} orders recorded, {per_s:.0} per second, {batch:.0} per transaction")?;
            match (raw_per_s, vs_raw) {
                (Some(raw), Some(ratio)) => {
                    writeln!(f, "; raw inserts of the same rows: {raw:.0} per second; ratio {ratio:.2}")?;
                }
                _ => writeln!(f)?,
            }
        }
        let s = &self.storm;
        writeln!(
            f,
            "storm: {} buyers, {} attempts, stock {}: {} sold ({} cancelled and sold again); {} oversold, {} undersold, {} duplicated, {} lost, {} unexpected",
            s.buyers, s.tries, s.stock, s.sold, s.returned, s.oversold, s.undersold, s.duplicated, s.lost, s.unexpected
        )?;
        writeln!(f)?;
        for line in &self.checks {
            writeln!(f, "{line}")?;
        }
        if let Some(why) = &self.distorted {
            writeln!(f, "\nNOT MEASURED: {why}")?;
        }
        if self.violations.is_empty() {
            writeln!(f, "\nno violation (seed {})", self.seed)
        } else {
            writeln!(f, "\n{} VIOLATIONS (seed {}):", self.violations.len(), self.seed)?;
            self.violations.iter().try_for_each(|violation| writeln!(f, "  {violation}"))
        }
    }
}

/// Responses and their latency over time, in slots of a tenth of a second.
#[derive(Debug, Default)]
pub struct Timeline {
    slots: BTreeMap<(&'static str, u64), Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    responses: u64,
    slowest_us: u64,
}

const SLOT_US: u64 = 100_000;

impl Timeline {
    pub fn add(&mut self, phase: &'static str, samples: &[Sample]) {
        for sample in samples {
            let slot = self.slots.entry((phase, sample.end_us / SLOT_US)).or_default();
            slot.responses += 1;
            slot.slowest_us = slot.slowest_us.max(sample.end_us.saturating_sub(sample.due_us));
        }
    }

    fn points(&self, of: impl Fn(&Slot) -> f64) -> Vec<(&'static str, Vec<(f64, f64)>)> {
        let first = self.slots.keys().map(|(_, slot)| *slot).min().unwrap_or(0);
        let mut phases: Vec<(&'static str, Vec<(f64, f64)>)> = Vec::new();
        #[expect(clippy::cast_precision_loss, reason = "tenths of seconds of one run")]
        for (&(phase, slot), values) in &self.slots {
            let point = ((slot - first) as f64 / 10.0, of(values));
            match phases.iter_mut().find(|(name, _)| *name == phase) {
                Some((_, points)) => points.push(point),
                None => phases.push((phase, vec![point])),
            }
        }
        phases
    }
}

const COLOURS: [(&str, &str); 4] =
    [("noop", "#8a8f98"), ("orders", "#1a7f4b"), ("refusals", "#b3541e"), ("storm", "#6a3fb5")];

/// A plot of points over seconds, with one colour per phase.
fn plot(title: &str, unit: &str, phases: &[(&'static str, Vec<(f64, f64)>)]) -> String {
    let (width, height, left, bottom) = (860.0, 240.0, 70.0, 30.0);
    let all = || phases.iter().flat_map(|(_, points)| points);
    let right = all().map(|point| point.0).fold(1.0, f64::max);
    let top = all().map(|point| point.1).fold(1.0, f64::max) * 1.05;
    let x = |value: f64| left + value / right * (width - left - 10.0);
    let y = |value: f64| height - bottom - value / top * (height - bottom - 30.0);
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\" font-family=\"sans-serif\" font-size=\"12\">"
    );
    let _ = write!(
        svg,
        "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/><text x=\"{left}\" y=\"18\" font-weight=\"bold\">{title}</text>"
    );
    for step in 0..=4 {
        let value = top / 4.0 * f64::from(step);
        let at = y(value);
        let _ = write!(
            svg,
            "<line x1=\"{left}\" x2=\"{width}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e3e5e8\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{value:.0}</text>",
            left - 6.0,
            at + 4.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{left}\" y=\"{:.0}\">0 s</text><text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{right:.0} s, {unit}</text>",
        height - 8.0,
        width - 10.0,
        height - 8.0
    );
    let mut key = width - 330.0;
    for (phase, points) in phases {
        let colour = COLOURS.iter().find(|(name, _)| name == phase).map_or("#000", |(_, colour)| colour);
        let _ = write!(
            svg,
            "<circle cx=\"{key}\" cy=\"14\" r=\"4\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"18\">{phase}</text>",
            key + 8.0
        );
        key += 80.0;
        for (at, value) in points {
            let _ = write!(svg, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2\" fill=\"{colour}\"/>", x(*at), y(*value));
        }
    }
    svg.push_str("</svg>");
    svg
}

impl Report {
    /// Responses per second over time.
    pub fn rates_svg(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "responses in a tenth of a second")]
        let points = self.timeline.points(|slot| slot.responses as f64 * 10.0);
        plot("Responses per second", "one dot per tenth of a second", &points)
    }

    /// The slowest response over time.
    pub fn slowest_svg(&self) -> String {
        #[expect(clippy::cast_precision_loss, reason = "microseconds of at most a minute")]
        let points = self.timeline.points(|slot| slot.slowest_us as f64 / 1000.0);
        plot("Slowest response, ms", "one dot per tenth of a second", &points)
    }

    /// A self-contained page with the table, the plots and the JSON.
    pub fn html(&self) -> String {
        let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;");
        let json = serde_json::to_string_pretty(self).unwrap_or_default();
        format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>stampede bench: {tier}</title>\
             <style>body{{font-family:sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}pre{{overflow:auto;background:#f6f7f8;padding:1rem}}svg{{width:100%}}</style>\
             <h1>stampede bench: {tier}</h1><p><strong>{verdict}</strong></p><pre>{table}</pre>{rates}{slowest}<h2>As JSON</h2><pre>{json}</pre></html>\n",
            tier = escape(&self.tier),
            verdict = match (self.violations.is_empty(), self.distorted.is_some()) {
                (false, _) => "There are violations.",
                (true, true) => "Not measured: rate limits of the target refused attempts.",
                (true, false) => "No violation.",
            },
            table = escape(&self.to_string()),
            rates = self.rates_svg(),
            slowest = self.slowest_svg(),
            json = escape(&json),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_few_refusals_by_a_limit_distort_the_figures() {
        let line = |response: Response, count| ResponseLatency {
            phase: "storm",
            response: response.as_str(),
            count,
            latency_ms: Quantiles::default(),
        };
        let why =
            |limited| distorted_by_limits(&[line(Response::SoldOut, 1000), line(Response::TooManyRequests, limited)]);
        assert_eq!((distorted_by_limits(&[]), why(0), why(1)), (None, None, None));
        assert!(why(2).is_some_and(|why| why.starts_with("2 of 1002 attempts") && why.contains("buy.per_user")));
    }

    #[test]
    fn messages_are_the_difference_of_two_counts() {
        let messages = Messages::of((10, 100), (14, 300));
        assert_eq!(messages, Messages { messages: 4, orders: 200, per_order: Some(0.02) });
        assert_eq!(Messages::of((1, 1), (1, 1)).per_order, None);
    }

    #[test]
    fn drain_is_compared_with_the_rate_of_raw_inserts() {
        let (sales, orders) = (Vec::new(), 600);
        let mut drain = Drain { orders, per_s: 300.0, batch: 100.0, raw_per_s: None, vs_raw: None, sales };
        drain.compare(600, std::time::Duration::from_secs(1));
        assert_eq!((drain.raw_per_s, drain.vs_raw), (Some(600.0), Some(0.5)));
    }

    #[test]
    fn batch_sizes_are_the_difference_of_two_histograms() {
        let before = [(1.0, 10), (2.0, 10), (f64::INFINITY, 10)];
        let after = [(1.0, 10), (2.0, 15), (f64::INFINITY, 15)];
        let batch = Batch::of(&before, &after);
        assert_eq!((batch.p50, batch.max), (Some(2.0), Some(2.0)));
        let none = Batch::of(&after, &after);
        assert_eq!((none.p50, none.max), (None, None));
    }
}
