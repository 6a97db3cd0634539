//! The phases of a benchmark, and the proof at its end.
//!
//! A round is a slice of the no-op, a sale that everybody gets one of, and a slice of refusals at a sale that is sold out: so
//! what else the machine is doing hits all three. Then comes the `storm`. At the end everything that was answered is compared
//! with ledger and gates.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use stampede_core::SaleId;

use crate::check::{self, Patience, Rules};
use crate::generator::{Ask, Crowd, Outcome, Plan, Pulse, Sample, Until};
use crate::history::{Action, Attempt, Heard};
use crate::machine;
use crate::report::{AnswerLatency, Batch, Latencies, Measured, Noop, Quantiles, Report, Timeline};
use crate::storm;
use crate::system::{Buyers, System, SystemError};

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub buyers: usize,
    /// Of the storm.
    pub stock: usize,
    /// Of each buyer in the storm.
    pub tries: usize,
    pub connections: usize,
    /// Requests a second that come whether the server keeps up or not.
    pub rate: Option<f64>,
    pub seed: u64,
    /// How long each kind of request is measured in all.
    pub measure: Duration,
    /// How long the storm lasts at least.
    pub storm: Duration,
    /// Kill every node of ours once in the middle of the storm.
    pub kill: bool,
}

/// Tells what is going on.
pub trait Progress {
    fn phase(&self, name: &str);
}

/// One slice of a round.
const SLICE: Duration = Duration::from_millis(1000);
/// Before anything is measured.
const WARM_UP: Duration = Duration::from_millis(300);
/// How often those who were not told are asked to come again, and how long the system may take to come to rest.
const COME_AGAIN: u32 = 100;
const AT_REST: Patience = Patience { lasting: Duration::from_secs(10), every: Duration::from_millis(200) };

/// What one kind of request has come to so far.
#[derive(Default)]
struct Tally {
    samples: Vec<Sample>,
    spent: Duration,
    cpu: Option<Duration>,
}

pub(crate) struct Bench<'a> {
    pub(crate) system: &'a mut System,
    pub(crate) options: Options,
    pub(crate) crowd: Crowd,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) shop: String,
    pub(crate) buyers: Buyers,
    pub(crate) rng: StdRng,
    pub(crate) history: Vec<Attempt>,
    pub(crate) timeline: Timeline,
    pub(crate) answers: Vec<AnswerLatency>,
}

impl Bench<'_> {
    pub(crate) fn buy(&self, sale: SaleId, buyers: Vec<u32>, until: Until) -> Plan {
        let ask = Ask { path: format!("/v1/sales/{sale}/orders"), tokens: self.buyers.tokens.clone() };
        Plan { ask, buyers, until, rate: self.options.rate }
    }

    /// Everybody, in an order of this run's own.
    pub(crate) fn everybody(&mut self, times: usize) -> Vec<u32> {
        let count = u32::try_from(self.buyers.users.len()).unwrap_or(u32::MAX);
        let mut all: Vec<u32> = (0..times).flat_map(|_| 0..count).collect();
        all.shuffle(&mut self.rng);
        all
    }

    pub(crate) fn remember(&mut self, sale: SaleId, samples: &[Sample]) {
        let users = &self.buyers.users;
        let attempt = |sample: &Sample| Attempt {
            action: Action::Buy,
            sale,
            user: users[sample.buyer as usize],
            start_us: sample.start_us,
            end_us: sample.end_us,
            heard: sample.heard,
            order: sample.order,
        };
        self.history.extend(samples.iter().map(attempt));
    }

    /// Carries a plan out and puts what it came to under its kind.
    async fn measure(&mut self, name: &'static str, plan: Plan, into: &mut Tally) -> Outcome {
        let before = self.system.cpu();
        let mut outcome = self.crowd.run(plan).await;
        if let (Some(before), Some(after)) = (before, self.system.cpu()) {
            *into.cpu.get_or_insert_default() += after.saturating_sub(before);
        }
        into.spent += outcome.elapsed;
        self.timeline.add(name, &outcome.samples);
        into.samples.append(&mut outcome.samples.clone());
        outcome.samples.shrink_to_fit();
        outcome
    }

    async fn noop(&mut self, span: Duration, into: &mut Tally) -> Result<(), SystemError> {
        let ask = Ask { path: "/load-test/noop".to_owned(), tokens: self.buyers.tokens.clone() };
        let plan = Plan { ask, buyers: self.everybody(1), until: Until::For(span), rate: None };
        let outcome = self.measure("noop", plan, into).await;
        // A yardstick that was refused would measure nothing.
        match outcome.samples.iter().all(|sample| sample.heard == Heard::Already) {
            true => Ok(()),
            false => Err(SystemError::Strange("POST /load-test/noop".to_owned())),
        }
    }

    /// Those who were not told ask again until they are.
    pub(crate) async fn ask_again(&mut self, sale: SaleId, samples: &[Sample]) -> Vec<Sample> {
        let mut all = samples.to_vec();
        for _ in 0..COME_AGAIN {
            let mut last: HashMap<u32, Heard> = HashMap::new();
            for sample in &all {
                let told = last.entry(sample.buyer).or_insert(Heard::Unknown);
                if sample.heard != Heard::Unknown {
                    *told = sample.heard;
                }
            }
            let mut untold: Vec<u32> =
                last.into_iter().filter(|(_, heard)| *heard == Heard::Unknown).map(|(buyer, _)| buyer).collect();
            if untold.is_empty() {
                break;
            }
            untold.sort_unstable();
            tokio::time::sleep(Duration::from_millis(100)).await;
            let plan = self.buy(sale, untold, Until::Once);
            all.extend(self.crowd.run(plan).await.samples);
        }
        all
    }
}

/// The whole benchmark. The history comes with it.
pub async fn run(
    system: &mut System,
    options: Options,
    pulse: &Arc<Pulse>,
    progress: &dyn Progress,
) -> Result<(Report, Vec<Attempt>), SystemError> {
    progress.phase("logging in");
    let buyers = system.log_in(options.buyers).await?;
    let shop = system.make_shop().await?;
    let threads = (std::thread::available_parallelism().map_or(2, usize::from) / 2).max(1);
    let call = |source: std::io::Error| SystemError::Call { what: "connecting".to_owned(), source: source.into() };
    let crowd = Crowd::connect(&system.addresses, options.connections, threads, pulse).await.map_err(call)?;
    let sold_out = system.make_sale(&shop, 1).await?;
    let mut bench = Bench {
        rng: StdRng::seed_from_u64(options.seed),
        system,
        options,
        crowd,
        pulse: pulse.clone(),
        shop,
        buyers,
        history: Vec::new(),
        timeline: Timeline::default(),
        answers: Vec::new(),
    };

    progress.phase("warming up");
    let first = bench.crowd.run(bench.buy(sold_out, vec![0], Until::Once)).await;
    bench.remember(sold_out, &first.samples);
    let others: Vec<u32> = bench.everybody(1).into_iter().filter(|&buyer| buyer != 0).collect();
    bench.noop(WARM_UP, &mut Tally::default()).await?;
    let refused = bench.crowd.run(bench.buy(sold_out, others.clone(), Until::For(WARM_UP))).await;
    bench.remember(sold_out, &refused.samples);

    let account = machine::account();
    let batches_before = bench.system.batches().await?;
    let (mut noop, mut orders, mut refusals) = (Tally::default(), Tally::default(), Tally::default());
    let mut sales = vec![sold_out];
    let slice = SLICE.min(options.measure);
    while [&noop, &orders, &refusals].iter().any(|tally| tally.spent < options.measure) {
        progress.phase("no-op");
        bench.noop(slice, &mut noop).await?;
        progress.phase("orders");
        let until = orders.spent + slice;
        while orders.spent < until {
            let sale = bench.system.make_sale(&bench.shop, options.buyers).await?;
            let everybody = bench.everybody(1);
            let plan = bench.buy(sale, everybody, Until::Once);
            let outcome = bench.measure("orders", plan, &mut orders).await;
            let samples = bench.ask_again(sale, &outcome.samples).await;
            bench.remember(sale, &samples);
            sales.push(sale);
        }
        progress.phase("refusals");
        let plan = bench.buy(sold_out, others.clone(), Until::For(slice));
        let outcome = bench.measure("refusals", plan, &mut refusals).await;
        bench.remember(sold_out, &outcome.samples);
    }
    let batches = bench.system.batches().await?;

    for (phase, tally) in [("orders", &orders), ("refusals", &refusals)] {
        bench.answers.extend(AnswerLatency::of(phase, &tally.samples));
    }

    progress.phase("storm");
    let storm = storm::run(&mut bench).await?;
    sales.push(storm.sale);

    progress.phase("proving");
    let rules = Rules { at_rest: true, ..Rules::default() };
    let gather = async || bench.system.evidence_of(&sales).await;
    let (evidence, lines) = check::look(AT_REST, rules, Some(&bench.history), gather).await?;
    let steal = match (account, machine::account()) {
        (Some(before), Some(after)) => Some(after.steal_since(before)),
        _ => None,
    };
    let mut violations: Vec<String> = lines.iter().filter(|line| line.failed()).map(ToString::to_string).collect();
    let storm = evidence.last().map(|sale| storm.report(sale, &bench)).unwrap_or_default();
    violations.extend(storm.violations());
    for sale in evidence.iter().rev().skip(1) {
        let sold = sale.ledger.orders.iter().filter(|row| row.live).count();
        let total = sale.ledger.sale.total as usize;
        if sold != total {
            violations.push(format!("sale {}: {sold} sold of {total}, though everybody asked", sale.ledger.sale.id));
        }
    }
    // Nodes of ours have no limits that a buyer could meet.
    let limited = bench.history.iter().filter(|attempt| attempt.heard == Heard::TooManyRequests).count();
    if limited > 0 && !bench.system.nodes.is_empty() {
        violations.push(format!("{limited} attempts were refused by a limit that is switched off"));
    }

    let noop_rate = rate(noop.samples.len(), noop.spent);
    let report = Report {
        tier: String::new(),
        connections: options.connections,
        nodes: bench.system.addresses.len(),
        orders: measured(&orders, Heard::Created, noop_rate),
        refusals: measured(&refusals, Heard::SoldOut, noop_rate),
        noop: Noop { count: noop.samples.len(), per_s: noop_rate, cpu_us: cpu_us(&noop, noop.samples.len()) },
        storm,
        latency_ms: Latencies {
            order: Quantiles::of(&orders.samples, Heard::Created),
            refusal: Quantiles::of(&refusals.samples, Heard::SoldOut),
        },
        answers: std::mem::take(&mut bench.answers),
        batch: Batch::of(&batches_before, &batches),
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

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn rate(count: usize, spent: Duration) -> f64 {
    if spent.is_zero() { 0.0 } else { count as f64 / spent.as_secs_f64() }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn cpu_us(tally: &Tally, count: usize) -> Option<f64> {
    tally.cpu.filter(|_| count > 0).map(|cpu| cpu.as_secs_f64() * 1e6 / count as f64)
}

fn measured(tally: &Tally, kind: Heard, noop_rate: f64) -> Measured {
    let count = tally.samples.iter().filter(|sample| sample.heard == kind).count();
    let per_s = rate(count, tally.spent);
    let vs_noop = if noop_rate > 0.0 { per_s / noop_rate } else { 0.0 };
    Measured { count, per_s, vs_noop, cpu_us: cpu_us(tally, count), other: tally.samples.len() - count }
}
