//! The phases of a benchmark, and the verification at its end.
//!
//! A round is a slice of no-op requests, a sale with stock for every buyer, and a slice of refusals at a sold-out sale, so that other load
//! on the machine affects all three alike. The `storm` follows. At the end, every response is compared with the ledger and the gates.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use stampede_core::SaleId;

use crate::check::{Polling, Rules};
use crate::drain;
use crate::generator::{LoadGenerator, Outcome, Plan, RequestTemplate, RunClock, Sample, Until};
use crate::history::{Action, Attempt, Response};
use crate::machine;
use crate::report::{
    Batch, Latencies, Measured, Messages, Noop, Quantiles, Report, ResponseLatency, Timeline, Violation, ViolationKind,
    distorted_by_limits,
};
use crate::storm;
use crate::system::{Buyers, System, SystemError};

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub buyers: usize,
    /// Stock of the storm's sale.
    pub stock: usize,
    /// Attempts per buyer in the storm.
    pub tries: usize,
    pub connections: usize,
    /// Open loop: requests per second, independent of the server's speed.
    pub rate: Option<f64>,
    pub seed: u64,
    /// The total time for which each kind of request is measured.
    pub measure: Duration,
    /// The minimum duration of the storm.
    pub storm: Duration,
    /// Connections of the storm; `None` for as many as all the rest has.
    pub storm_connections: Option<usize>,
    /// Kill every node that this process started once during the storm, while the stock is being sold.
    pub kill: bool,
    /// Measure how fast the late consumer records what waits in the queue.
    pub drain: bool,
}

/// Shows the progress of a run.
pub trait Progress {
    fn phase(&self, name: &str);
}

/// The length of one slice of a round.
const SLICE: Duration = Duration::from_millis(1000);
/// The time before anything is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// How often buyers without a response try again, and how long the system may take to become idle.
const MAX_RETRIES: u32 = 100;
const AT_REST: Polling = Polling { duration: Duration::from_secs(120), interval: Duration::from_millis(200) };

/// The results of one kind of request so far.
#[derive(Default)]
struct PhaseTotals {
    samples: Vec<Sample>,
    spent: Duration,
    cpu: Option<Duration>,
}

pub(crate) struct Bench<'a> {
    pub(crate) system: &'a mut System,
    pub(crate) options: Options,
    pub(crate) generator: LoadGenerator,
    pub(crate) clock: Arc<RunClock>,
    pub(crate) shop: String,
    pub(crate) buyers: Buyers,
    pub(crate) rng: StdRng,
    pub(crate) history: Vec<Attempt>,
    pub(crate) timeline: Timeline,
    pub(crate) responses: Vec<ResponseLatency>,
}

impl Bench<'_> {
    pub(crate) fn buy(&self, sale: SaleId, buyers: Vec<u32>, until: Until) -> Plan {
        let request = RequestTemplate { path: format!("/v1/sales/{sale}/orders"), tokens: self.buyers.tokens.clone() };
        Plan { request, buyers, until, rate: self.options.rate }
    }

    /// Every buyer `times` times, in random order.
    pub(crate) fn all_buyers(&mut self, times: usize) -> Vec<u32> {
        let count = u32::try_from(self.buyers.users.len()).unwrap_or(u32::MAX);
        let mut all: Vec<u32> = (0..times).flat_map(|_| 0..count).collect();
        all.shuffle(&mut self.rng);
        all
    }

    pub(crate) fn record(&mut self, sale: SaleId, samples: &[Sample]) {
        let users = &self.buyers.users;
        let attempt = |sample: &Sample| Attempt {
            action: Action::Buy,
            sale,
            user: users[sample.buyer as usize],
            start_us: sample.start_us,
            end_us: sample.end_us,
            response: sample.response,
            order: sample.order,
        };
        self.history.extend(samples.iter().map(attempt));
    }

    /// Runs a plan and adds its results to the totals of its kind.
    async fn measure(&mut self, name: &'static str, plan: Plan, into: &mut PhaseTotals) -> Outcome {
        let before = self.system.cpu();
        let mut outcome = self.generator.run(plan).await;
        if let (Some(before), Some(after)) = (before, self.system.cpu()) {
            *into.cpu.get_or_insert_default() += after.saturating_sub(before);
        }
        into.spent += outcome.elapsed;
        self.timeline.add(name, &outcome.samples);
        into.samples.append(&mut outcome.samples.clone());
        outcome.samples.shrink_to_fit();
        outcome
    }

    async fn noop(&mut self, span: Duration, into: &mut PhaseTotals) -> Result<(), SystemError> {
        let request = RequestTemplate { path: "/load-test/noop".to_owned(), tokens: self.buyers.tokens.clone() };
        let plan = Plan { request, buyers: self.all_buyers(1), until: Until::For(span), rate: None };
        let outcome = self.measure("noop", plan, into).await;
        // Refused no-ops would make the comparison meaningless.
        match outcome.samples.iter().all(|sample| sample.response == Response::Already) {
            true => Ok(()),
            false => Err(SystemError::Unexpected("POST /load-test/noop".to_owned())),
        }
    }

    /// Repeats the requests of buyers without a response until they get one.
    pub(crate) async fn retry_unanswered(&mut self, sale: SaleId, samples: &[Sample]) -> Vec<Sample> {
        let mut all = samples.to_vec();
        for _ in 0..MAX_RETRIES {
            let mut last: HashMap<u32, Response> = HashMap::new();
            for sample in &all {
                let known = last.entry(sample.buyer).or_insert(Response::Unknown);
                if sample.response != Response::Unknown {
                    *known = sample.response;
                }
            }
            let mut unanswered: Vec<u32> = last
                .into_iter()
                .filter(|(_, response)| *response == Response::Unknown)
                .map(|(buyer, _)| buyer)
                .collect();
            if unanswered.is_empty() {
                break;
            }
            unanswered.sort_unstable();
            tokio::time::sleep(Duration::from_millis(100)).await;
            let plan = self.buy(sale, unanswered, Until::Once);
            all.extend(self.generator.run(plan).await.samples);
        }
        all
    }
}

/// Runs the whole benchmark and returns the report and the history.
pub async fn run(
    system: &mut System,
    options: Options,
    clock: &Arc<RunClock>,
    progress: &dyn Progress,
) -> Result<(Report, Vec<Attempt>), SystemError> {
    progress.phase("logging in");
    let buyers = system.log_in(options.buyers).await?;
    let shop = system.create_shop().await?;
    let generator = connect(system, options.connections, clock).await?;
    let sold_out = system.create_sale(&shop, 1).await?;
    let mut bench = Bench {
        rng: StdRng::seed_from_u64(options.seed),
        system,
        options,
        generator,
        clock: clock.clone(),
        shop,
        buyers,
        history: Vec::new(),
        timeline: Timeline::default(),
        responses: Vec::new(),
    };

    progress.phase("warming up");
    let first = bench.generator.run(bench.buy(sold_out, vec![0], Until::Once)).await;
    bench.record(sold_out, &first.samples);
    let others: Vec<u32> = bench.all_buyers(1).into_iter().filter(|&buyer| buyer != 0).collect();
    bench.noop(WARM_UP, &mut PhaseTotals::default()).await?;
    let refused = bench.generator.run(bench.buy(sold_out, others.clone(), Until::For(WARM_UP))).await;
    bench.record(sold_out, &refused.samples);

    let cpu_times = machine::cpu_times();
    let batches_before = bench.system.batches().await?;
    let messages_before = bench.system.messages().await?;
    let (mut noop, mut orders, mut refusals) = (PhaseTotals::default(), PhaseTotals::default(), PhaseTotals::default());
    let mut sales = vec![sold_out];
    let slice = SLICE.min(options.measure);
    while [&noop, &orders, &refusals].iter().any(|totals| totals.spent < options.measure) {
        progress.phase("no-op");
        bench.noop(slice, &mut noop).await?;
        progress.phase("orders");
        let until = orders.spent + slice;
        while orders.spent < until {
            let sale = bench.system.create_sale(&bench.shop, options.buyers).await?;
            let all_buyers = bench.all_buyers(1);
            let plan = bench.buy(sale, all_buyers, Until::Once);
            let outcome = bench.measure("orders", plan, &mut orders).await;
            let samples = bench.retry_unanswered(sale, &outcome.samples).await;
            bench.record(sale, &samples);
            sales.push(sale);
        }
        progress.phase("refusals");
        let plan = bench.buy(sold_out, others.clone(), Until::For(slice));
        let outcome = bench.measure("refusals", plan, &mut refusals).await;
        bench.record(sold_out, &outcome.samples);
    }
    let batches = bench.system.batches().await?;
    let messages = bench.system.messages().await?;

    for (phase, totals) in [("orders", &orders), ("refusals", &refusals)] {
        bench.responses.extend(ResponseLatency::of(phase, &totals.samples));
    }

    progress.phase("storm");
    let storm = storm::run(&mut bench).await?;
    sales.push(storm.sale);

    let drain = if options.drain {
        progress.phase("draining");
        Some(drain::run(bench.system, &sales).await?)
    } else {
        bench.system.start_late_consumer()?;
        None
    };

    progress.phase("verifying");
    let rules = Rules { at_rest: true, ..Rules::default() };
    let (evidence, lines) = bench.system.check(&sales, AT_REST, rules, Some(&bench.history)).await?;
    let steal = match (cpu_times, machine::cpu_times()) {
        (Some(before), Some(after)) => Some(after.steal_since(before)),
        _ => None,
    };
    let mut violations: Vec<Violation> = lines.iter().filter(|line| line.failed()).map(Violation::from).collect();
    let limited: Vec<SaleId> = bench
        .history
        .iter()
        .filter(|attempt| attempt.response == Response::TooManyRequests)
        .map(|attempt| attempt.sale)
        .collect();
    // Buyers whom a rate limit refused may leave stock unsold.
    let all_tried = |sale: SaleId| !limited.contains(&sale);
    let storm_sale = storm.sale;
    let storm = evidence.last().map(|sale| storm.report(sale, &bench)).unwrap_or_default();
    violations.extend(storm.violations(all_tried(storm_sale)));
    for sale in evidence.iter().rev().skip(1) {
        let sold = sale.ledger.orders.iter().filter(|row| row.live).count();
        let total = sale.ledger.sale.total as usize;
        if sold > total || (sold < total && all_tried(sale.ledger.sale.id)) {
            let kind = if sold > total { ViolationKind::Oversold } else { ViolationKind::Undersold };
            let text = format!("sale {}: {sold} sold of {total}, although every buyer tried", sale.ledger.sale.id);
            violations.push(Violation::new(kind, text));
        }
    }
    // Nodes that this process started have limits that no buyer reaches.
    if !limited.is_empty() && !bench.system.nodes.is_empty() {
        let text = format!("{} attempts were refused by a limit that is switched off", limited.len());
        violations.push(Violation::new(ViolationKind::Other, text));
    }

    // With a queue, buyers are answered before their orders are recorded.
    let is_pending = |sample: &Sample| sample.response == Response::Pending;
    let granted = if orders.samples.iter().any(is_pending) { Response::Pending } else { Response::Created };
    let noop_rate = rate(noop.samples.len(), noop.spent);
    let report = Report {
        tier: String::new(),
        connections: options.connections,
        nodes: bench.system.addresses.len(),
        orders: measured(&orders, granted, noop_rate),
        refusals: measured(&refusals, Response::SoldOut, noop_rate),
        noop: Noop { count: noop.samples.len(), per_s: noop_rate, cpu_us: cpu_us(&noop, noop.samples.len()) },
        storm,
        latency_ms: Latencies {
            order: Quantiles::of(&orders.samples, granted),
            refusal: Quantiles::of(&refusals.samples, Response::SoldOut),
        },
        distorted: distorted_by_limits(&bench.responses),
        responses: std::mem::take(&mut bench.responses),
        batch: Batch::of(&batches_before, &batches),
        messages: (granted == Response::Pending).then(|| Messages::of(messages_before, messages)),
        drain,
        peak_rss_bytes: bench.system.peak_rss(),
        steal,
        seed: options.seed,
        rate: options.rate,
        checks: lines,
        violations,
        timeline: std::mem::take(&mut bench.timeline),
    };
    Ok((report, bench.history))
}

/// Opens connections to all nodes, with as many threads as half of the processors.
pub(crate) async fn connect(
    system: &System,
    connections: usize,
    clock: &Arc<RunClock>,
) -> Result<LoadGenerator, SystemError> {
    let threads = (std::thread::available_parallelism().map_or(2, usize::from) / 2).max(1);
    let call = |source: std::io::Error| SystemError::Call { what: "connecting".to_owned(), source: source.into() };
    LoadGenerator::connect(&system.addresses, connections, threads, clock).await.map_err(call)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn rate(count: usize, spent: Duration) -> f64 {
    if spent.is_zero() { 0.0 } else { count as f64 / spent.as_secs_f64() }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn cpu_us(totals: &PhaseTotals, count: usize) -> Option<f64> {
    totals.cpu.filter(|_| count > 0).map(|cpu| cpu.as_secs_f64() * 1e6 / count as f64)
}

fn measured(totals: &PhaseTotals, kind: Response, noop_rate: f64) -> Measured {
    let count = totals.samples.iter().filter(|sample| sample.response == kind).count();
    let per_s = rate(count, totals.spent);
    let vs_noop = if noop_rate > 0.0 { per_s / noop_rate } else { 0.0 };
    Measured { count, per_s, vs_noop, cpu_us: cpu_us(totals, count), other: totals.samples.len() - count }
}
