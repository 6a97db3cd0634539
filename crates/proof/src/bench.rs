//! The phases of a benchmark, and the proof at its end.
//!
//! A round is a slice of the no-op, a sale that everybody gets one of, and a slice of refusals at a sale that is sold out: so
//! what else the machine is doing hits all three. Then comes the storm: many more buyers than stock, several tries each; some who
//! got one give it back, and others get it. In the end everything that was heard is held against ledger and gate.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use stampede_core::{OrderId, SaleId, UserId};
use stampede_testkit::Dice;

use crate::check::{self, Evidence, Line};
use crate::generator::{Ask, Crowd, Outcome, Plan, Pulse, Sample};
use crate::history::{Attempt, Heard};
use crate::machine;
use crate::report::{Batch, Latencies, Measured, Noop, Quantiles, Report, Storm, Timeline};
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
const REST_WITHIN: Duration = Duration::from_secs(10);
/// The most who give theirs back in the storm.
const MAX_RETURNS: usize = 50;

/// What one kind of request has come to so far.
#[derive(Default)]
struct Tally {
    samples: Vec<Sample>,
    spent: Duration,
    cpu: Option<Duration>,
}

struct Bench<'a> {
    system: &'a mut System,
    options: Options,
    crowd: Crowd,
    shop: String,
    buyers: Buyers,
    dice: Dice,
    history: Vec<Attempt>,
    timeline: Timeline,
    /// Found on the way.
    violations: Vec<String>,
}

impl Bench<'_> {
    fn buy(&self, sale: SaleId, buyers: Vec<u32>, repeat_for: Option<Duration>) -> Plan {
        let ask = Ask::Buy { path: format!("/v1/sales/{sale}/orders"), tokens: self.buyers.tokens.clone() };
        Plan { ask, buyers, repeat_for, rate: self.options.rate }
    }

    /// Everybody, in an order of this run's own.
    fn everybody(&mut self, times: usize) -> Vec<u32> {
        let count = u32::try_from(self.buyers.users.len()).unwrap_or(u32::MAX);
        let mut all: Vec<u32> = (0..times).flat_map(|_| 0..count).collect();
        for place in (1..all.len()).rev() {
            let other = self.dice.within(0..place as u64 + 1);
            all.swap(place, usize::try_from(other).unwrap_or(0));
        }
        all
    }

    fn remember(&mut self, sale: SaleId, samples: &[Sample]) {
        let users = &self.buyers.users;
        let attempt = |sample: &Sample| Attempt {
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

    async fn noop(&mut self, span: Duration, into: &mut Tally) {
        let plan = Plan { ask: Ask::Noop, buyers: vec![0], repeat_for: Some(span), rate: None };
        self.measure("noop", plan, into).await;
    }

    /// Those who were not told ask again until they are.
    async fn ask_again(&mut self, sale: SaleId, samples: &[Sample]) -> Vec<Sample> {
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
            let plan = self.buy(sale, untold, None);
            all.extend(self.crowd.run(plan).await.samples);
        }
        all
    }

    /// Waits until nothing is on its way any more, and gathers what there is.
    async fn at_rest(&self, sale: SaleId, deadline: Instant) -> Result<Evidence, SystemError> {
        loop {
            let evidence = self.system.evidence(sale).await?;
            let failed = check::check(std::slice::from_ref(&evidence), None).iter().any(Line::failed);
            if !failed || Instant::now() >= deadline {
                return Ok(evidence);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Many more buyers than stock; some give theirs back.
    async fn storm(&mut self) -> Result<(SaleId, usize), SystemError> {
        let sale = self.system.make_sale(&self.shop, self.options.stock).await?;
        let everybody = self.everybody(self.options.tries);
        let plan = self.buy(sale, everybody, None);
        let samples = if self.options.kill && !self.system.nodes.is_empty() {
            let killing = async {
                // Somewhere in the middle of the selling.
                tokio::time::sleep(Duration::from_millis(self.dice.within(5..60))).await;
                self.system.nodes.iter_mut().try_for_each(crate::system::Node::crash)
            };
            let (outcome, killed) = tokio::join!(self.crowd.run(plan), killing);
            killed?;
            outcome.samples
        } else {
            self.crowd.run(plan).await.samples
        };
        self.timeline.add("storm", &samples);
        let samples = self.ask_again(sale, &samples).await;
        self.remember(sale, &samples);

        let mut owners: Vec<(u32, OrderId)> = samples
            .iter()
            .filter(|sample| sample.heard == Heard::Created)
            .filter_map(|s| Some((s.buyer, s.order?)))
            .collect();
        owners.truncate(MAX_RETURNS.min(self.options.stock / 10));
        for &(buyer, order) in &owners {
            if !self.system.cancel(order, &self.buyers.tokens[buyer as usize]).await? {
                self.violations.push(format!("order {order} was confirmed and cannot be cancelled"));
            }
        }
        let has: HashSet<u32> =
            samples.iter().filter(|sample| sample.heard.is_yes()).map(|sample| sample.buyer).collect();
        let count = u32::try_from(self.buyers.users.len()).unwrap_or(u32::MAX);
        let late: Vec<u32> = (0..count).filter(|buyer| !has.contains(buyer)).take(owners.len()).collect();
        // What was not given back cannot be had again; that is told already.
        if self.violations.is_empty() {
            self.system.shown_everywhere(sale, owners.len()).await?;
        }
        let plan = self.buy(sale, late, None);
        let outcome = self.crowd.run(plan).await;
        let samples = self.ask_again(sale, &outcome.samples).await;
        self.remember(sale, &samples);
        Ok((sale, owners.len()))
    }
}

/// The whole benchmark. The history comes with it.
pub async fn run(
    system: &mut System,
    options: Options,
    pulse: &std::sync::Arc<Pulse>,
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
        dice: Dice::new(options.seed),
        system,
        options,
        crowd,
        shop,
        buyers,
        history: Vec::new(),
        timeline: Timeline::default(),
        violations: Vec::new(),
    };

    progress.phase("warming up");
    let first = bench.crowd.run(bench.buy(sold_out, vec![0], None)).await;
    bench.remember(sold_out, &first.samples);
    let others: Vec<u32> = bench.everybody(1).into_iter().filter(|&buyer| buyer != 0).collect();
    bench.noop(WARM_UP, &mut Tally::default()).await;
    let refused = bench.crowd.run(bench.buy(sold_out, others.clone(), Some(WARM_UP))).await;
    bench.remember(sold_out, &refused.samples);

    let account = machine::account();
    let batches_before = bench.system.batches().await?;
    let (mut noop, mut orders, mut refusals) = (Tally::default(), Tally::default(), Tally::default());
    let mut sales = vec![sold_out];
    let slice = SLICE.min(options.measure);
    while [&noop, &orders, &refusals].iter().any(|tally| tally.spent < options.measure) {
        progress.phase("no-op");
        bench.noop(slice, &mut noop).await;
        progress.phase("orders");
        let until = orders.spent + slice;
        while orders.spent < until {
            let sale = bench.system.make_sale(&bench.shop, options.buyers).await?;
            let everybody = bench.everybody(1);
            let plan = bench.buy(sale, everybody, None);
            let outcome = bench.measure("orders", plan, &mut orders).await;
            let samples = bench.ask_again(sale, &outcome.samples).await;
            bench.remember(sale, &samples);
            sales.push(sale);
        }
        progress.phase("refusals");
        let plan = bench.buy(sold_out, others.clone(), Some(slice));
        let outcome = bench.measure("refusals", plan, &mut refusals).await;
        bench.remember(sold_out, &outcome.samples);
    }
    let batches = bench.system.batches().await?;

    progress.phase("storm");
    let (storm_sale, returned) = bench.storm().await?;
    sales.push(storm_sale);

    progress.phase("proving");
    let mut evidence = Vec::new();
    let deadline = Instant::now() + REST_WITHIN;
    for &sale in &sales {
        evidence.push(bench.at_rest(sale, deadline).await?);
    }
    let steal = match (account, machine::account()) {
        (Some(before), Some(after)) => Some(after.steal_since(before)),
        _ => None,
    };
    let lines = check::check(&evidence, Some(&bench.history));
    let mut violations: Vec<String> = lines.iter().filter(|line| line.failed()).map(ToString::to_string).collect();
    let storm = evidence.last().map(|sale| tell_storm(sale, &bench, returned)).unwrap_or_default();
    violations.append(&mut bench.violations);
    violations.extend(storm.violations());
    for sale in evidence.iter().rev().skip(1) {
        let sold = sale.ledger.orders.iter().filter(|row| row.live).count();
        let total = sale.ledger.sale.total as usize;
        if sold != total {
            violations.push(format!("sale {}: {sold} sold of {total}, though everybody asked", sale.ledger.sale.id));
        }
    }
    let wrong = bench.history.iter().filter(|attempt| attempt.heard == Heard::Wrong).count();
    if wrong > 0 {
        violations.push(format!("{wrong} answers that nobody should get"));
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

/// What the storm's crowd heard against what the ledger holds.
fn tell_storm(evidence: &Evidence, bench: &Bench<'_>, returned: usize) -> Storm {
    let sale = evidence.ledger.sale.id;
    let mine = || bench.history.iter().filter(|attempt| attempt.sale == sale);
    let live: Vec<(UserId, OrderId)> =
        evidence.ledger.orders.iter().filter(|row| row.live).map(|row| (row.order.user, row.order.id)).collect();
    let rows: HashSet<OrderId> = evidence.ledger.orders.iter().map(|row| row.order.id).collect();
    let owners: HashSet<UserId> = live.iter().map(|(user, _)| *user).collect();
    let asked: HashSet<UserId> =
        mine().filter(|attempt| attempt.heard.may_have_row()).map(|attempt| attempt.user).collect();
    let confirmed: HashSet<OrderId> =
        mine().filter(|attempt| attempt.heard.is_yes()).filter_map(|attempt| attempt.order).collect();
    let (stock, buyers) = (bench.options.stock, bench.options.buyers);
    let wanted = stock.min(buyers);
    Storm {
        buyers,
        stock,
        tries: mine().count(),
        sold: live.len(),
        returned,
        oversold: live.len().saturating_sub(stock),
        undersold: wanted.saturating_sub(live.len()),
        duplicated: live.len() - owners.len(),
        lost: confirmed.difference(&rows).count(),
        unexpected: owners.difference(&asked).count(),
    }
}
