//! The storm: many more buyers than stock, all of them trying for seconds. Some orders are cancelled meanwhile, and their stock is sold
//! again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::{OrderId, SaleId, UserId};

use crate::bench::{Bench, connect};
use crate::check::Evidence;
use crate::generator::{RunClock, Sample, Until};
use crate::history::{Action, Attempt, Response};
use crate::http::Client;
use crate::recorder::{Buyer, Recorder};
use crate::report::{ResponseLatency, Storm};
use crate::system::{Buyers, Node, System, SystemError};

/// The maximum number of cancellations.
const MAX_CANCELS: usize = 50;
/// How often, and at what interval, buyers without an order try again for the remaining stock.
const LAST_ROUNDS: u32 = 40;
const LAST_ROUND_INTERVAL: Duration = Duration::from_millis(250);
/// How often the orders are counted of which one is the last before the kill.
const KILL_POLL: Duration = Duration::from_millis(1);

/// The result of a storm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StormResult {
    pub(crate) sale: SaleId,
    returned: usize,
    /// When the nodes were killed, by the run clock.
    killed_us: Option<u64>,
}

pub(crate) async fn run(bench: &mut Bench<'_>) -> Result<StormResult, SystemError> {
    let options = bench.options;
    let sale = bench.system.create_sale(&bench.shop, options.stock).await?;
    let all_buyers = bench.all_buyers(options.tries);
    let plan = bench.buy(sale, all_buyers, Until::OnceAndFor(options.storm));
    let (mut kill_rng, mut cancel_rng) = (StdRng::from_rng(&mut bench.rng), StdRng::from_rng(&mut bench.rng));
    let own_generator = match options.storm_connections {
        Some(connections) => Some(connect(bench.system, connections, &bench.clock).await?),
        None => None,
    };
    let generator = own_generator.as_ref().unwrap_or(&bench.generator);
    // The nodes are killed while the system is used, so both cannot be borrowed together.
    let mut nodes = std::mem::take(&mut bench.system.nodes);
    let clock = bench.clock.clone();
    let confirmed_before = clock.confirmed.load(Ordering::Relaxed);
    let killing = async {
        if !options.kill || nodes.is_empty() {
            return Ok::<_, SystemError>(None);
        }
        // A random order of the first quarter of the stock, so that others follow.
        let last = confirmed_before + kill_rng.random_range(1..=(options.stock / 4).max(1)) as u64;
        let deadline = Instant::now() + options.storm;
        while clock.confirmed.load(Ordering::Relaxed) < last && Instant::now() < deadline {
            tokio::time::sleep(KILL_POLL).await;
        }
        let killed_us = clock.us(Instant::now());
        nodes.iter_mut().try_for_each(Node::kill_and_restart)?;
        Ok(Some(killed_us))
    };
    let count = MAX_CANCELS.min(options.stock / 10);
    let cancels = Canceller { system: &*bench.system, buyers: &bench.buyers, clock: &bench.clock, sale };
    let cancelling = cancels.run(options.storm, count, &mut cancel_rng);
    let (outcome, killed, cancelled) = tokio::join!(generator.run(plan), killing, cancelling);
    bench.system.nodes = nodes;
    let killed_us = killed?;
    bench.timeline.add("storm", &outcome.samples);
    bench.responses.extend(ResponseLatency::of("storm", &outcome.samples));
    let samples = bench.retry_unanswered(sale, &outcome.samples).await;
    bench.record(sale, &samples);
    let returned = cancelled.iter().filter(|attempt| attempt.response == Response::Cancelled).count();
    bench.history.extend(cancelled);
    sell_remaining(bench, sale, &samples).await?;
    Ok(StormResult { sale, returned, killed_us })
}

/// Sells the stock that was returned at the very end.
async fn sell_remaining(bench: &mut Bench<'_>, sale: SaleId, samples: &[Sample]) -> Result<(), SystemError> {
    let wanted = bench.options.stock.min(bench.options.buyers);
    let mut all_buyers: Vec<u32> = samples.iter().map(|sample| sample.buyer).collect();
    all_buyers.sort_unstable();
    all_buyers.dedup();
    for _ in 0..LAST_ROUNDS {
        let evidence = bench.system.evidence(sale).await?;
        let owners: HashSet<UserId> =
            evidence.ledger.orders.iter().filter(|row| row.live).map(|row| row.order.user).collect();
        if owners.len() >= wanted {
            break;
        }
        let users = &bench.buyers.users;
        let without = all_buyers.iter().copied().filter(|buyer| !owners.contains(&users[*buyer as usize])).collect();
        let outcome = bench.generator.run(bench.buy(sale, without, Until::Once)).await;
        let samples = bench.retry_unanswered(sale, &outcome.samples).await;
        bench.record(sale, &samples);
        tokio::time::sleep(LAST_ROUND_INTERVAL).await;
    }
    Ok(())
}

/// Cancels orders of a sale while it runs.
struct Canceller<'a> {
    system: &'a System,
    buyers: &'a Buyers,
    clock: &'a Arc<RunClock>,
    sale: SaleId,
}

impl Canceller<'_> {
    async fn run(&self, span: Duration, count: usize, rng: &mut StdRng) -> Vec<Attempt> {
        let indexes: HashMap<UserId, usize> = self.buyers.users.iter().copied().zip(0..).collect();
        let interval = span / u32::try_from(count + 1).unwrap_or(u32::MAX);
        let recorder = Recorder::new(self.clock.clone());
        let mut tried: HashSet<OrderId> = HashSet::new();
        for _ in 0..count {
            tokio::time::sleep(interval).await;
            // While a node restarts, its orders cannot be read; the next iteration tries again.
            let Ok(mut orders) = self.system.some_orders(self.sale).await else { continue };
            orders.retain(|(user, order)| indexes.contains_key(user) && !tried.contains(order));
            if orders.is_empty() {
                continue;
            }
            let (user, order) = orders[rng.random_range(0..orders.len())];
            tried.insert(order);
            let buyer = Buyer { id: user, token: self.buyers.tokens[indexes[&user]].clone() };
            let Some(&address) = self.system.addresses.first() else { break };
            let Ok(mut client) = Client::connect(address).await else { continue };
            recorder.cancel(&mut client, self.sale, &buyer, order).await;
        }
        recorder.ended()
    }
}

impl StormResult {
    /// Compares the responses with the ledger.
    pub(crate) fn report(&self, evidence: &Evidence, bench: &Bench<'_>) -> Storm {
        let attempts = || {
            let buys = bench.history.iter().filter(|attempt| attempt.action == Action::Buy);
            buys.filter(|attempt| attempt.sale == self.sale)
        };
        let live: Vec<UserId> =
            evidence.ledger.orders.iter().filter(|row| row.live).map(|row| row.order.user).collect();
        let rows: HashSet<OrderId> = evidence.ledger.orders.iter().map(|row| row.order.id).collect();
        let owners: HashSet<UserId> = live.iter().copied().collect();
        let requested: HashSet<UserId> =
            attempts().filter(|attempt| attempt.response.may_have_created()).map(|attempt| attempt.user).collect();
        let confirmed: HashSet<OrderId> = attempts()
            .filter(|attempt| attempt.response.is_confirmation())
            .filter_map(|attempt| attempt.order)
            .collect();
        // Orders that were confirmed before the kill, and those for which the request was sent after it.
        let around_kill = self.killed_us.map(|killed_us| {
            let new = || attempts().filter(|attempt| attempt.response.is_new_order());
            let before = new().filter(|attempt| attempt.end_us <= killed_us).count();
            (before, new().filter(|attempt| attempt.start_us > killed_us).count())
        });
        let (stock, buyers) = (bench.options.stock, bench.options.buyers);
        Storm {
            buyers,
            stock,
            tries: attempts().count(),
            sold: live.len(),
            returned: self.returned,
            before_kill: around_kill.map(|(before, _)| before),
            after_kill: around_kill.map(|(_, after)| after),
            oversold: live.len().saturating_sub(stock),
            undersold: stock.min(buyers).saturating_sub(live.len()),
            duplicated: live.len() - owners.len(),
            lost: confirmed.difference(&rows).count(),
            unexpected: owners.difference(&requested).count(),
        }
    }
}
