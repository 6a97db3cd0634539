//! The storm: many more buyers than stock, all of them pressing for seconds. Some orders are cancelled meanwhile, and others get what
//! comes back.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::{OrderId, SaleId, UserId};

use crate::bench::Bench;
use crate::check::Evidence;
use crate::generator::{Pulse, Sample, Until};
use crate::history::{Action, Attempt, Heard};
use crate::report::{AnswerLatency, Storm};
use crate::system::{Buyers, Node, System, SystemError};

/// The most orders that are cancelled.
const MAX_CANCELS: usize = 50;
/// How often, and how long apart, those without an order try again for what is left.
const LAST_ROUNDS: u32 = 40;
const LAST_ROUND_EVERY: Duration = Duration::from_millis(250);

/// What is known of a storm when it is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Over {
    pub(crate) sale: SaleId,
    returned: usize,
}

pub(crate) async fn run(bench: &mut Bench<'_>) -> Result<Over, SystemError> {
    let options = bench.options;
    let sale = bench.system.make_sale(&bench.shop, options.stock).await?;
    let everybody = bench.everybody(options.tries);
    let plan = bench.buy(sale, everybody, Until::OnceAndFor(options.storm));
    let (mut kill_rng, mut cancel_rng) = (StdRng::from_rng(&mut bench.rng), StdRng::from_rng(&mut bench.rng));
    // Killed and asked at the same time, so the one cannot be borrowed from the other.
    let mut nodes = std::mem::take(&mut bench.system.nodes);
    let killing = async {
        if options.kill {
            // Somewhere in the middle of the selling.
            tokio::time::sleep(Duration::from_millis(kill_rng.random_range(5..60))).await;
            nodes.iter_mut().try_for_each(Node::crash)?;
        }
        Ok::<(), SystemError>(())
    };
    let count = MAX_CANCELS.min(options.stock / 10);
    let cancels = Cancels { system: &*bench.system, buyers: &bench.buyers, pulse: &bench.pulse, sale };
    let cancelling = cancels.spread_over(options.storm, count, &mut cancel_rng);
    let (outcome, killed, cancelled) = tokio::join!(bench.crowd.run(plan), killing, cancelling);
    bench.system.nodes = nodes;
    killed?;
    bench.timeline.add("storm", &outcome.samples);
    bench.answers.extend(AnswerLatency::of("storm", &outcome.samples));
    let samples = bench.ask_again(sale, &outcome.samples).await;
    bench.remember(sale, &samples);
    let returned = cancelled.iter().filter(|attempt| attempt.heard == Heard::Cancelled).count();
    bench.history.extend(cancelled);
    sell_the_rest(bench, sale, &samples).await?;
    Ok(Over { sale, returned })
}

/// What came back at the very end is bought, too.
async fn sell_the_rest(bench: &mut Bench<'_>, sale: SaleId, samples: &[Sample]) -> Result<(), SystemError> {
    let wanted = bench.options.stock.min(bench.options.buyers);
    // Everybody was told by now: a buyer's last answer says whether they have one, unless they cancelled it.
    let mut everybody: Vec<u32> = samples.iter().map(|sample| sample.buyer).collect();
    everybody.sort_unstable();
    everybody.dedup();
    for _ in 0..LAST_ROUNDS {
        let evidence = bench.system.evidence(sale).await?;
        let owners: HashSet<UserId> =
            evidence.ledger.orders.iter().filter(|row| row.live).map(|row| row.order.user).collect();
        if owners.len() >= wanted {
            break;
        }
        let users = &bench.buyers.users;
        let without = everybody.iter().copied().filter(|buyer| !owners.contains(&users[*buyer as usize])).collect();
        let outcome = bench.crowd.run(bench.buy(sale, without, Until::Once)).await;
        let samples = bench.ask_again(sale, &outcome.samples).await;
        bench.remember(sale, &samples);
        tokio::time::sleep(LAST_ROUND_EVERY).await;
    }
    Ok(())
}

/// Cancels orders of a sale while it goes on.
struct Cancels<'a> {
    system: &'a System,
    buyers: &'a Buyers,
    pulse: &'a Pulse,
    sale: SaleId,
}

impl Cancels<'_> {
    async fn spread_over(&self, span: Duration, count: usize, rng: &mut StdRng) -> Vec<Attempt> {
        let places: HashMap<UserId, usize> = self.buyers.users.iter().copied().zip(0..).collect();
        let every = span / u32::try_from(count + 1).unwrap_or(u32::MAX);
        let mut cancels: Vec<Attempt> = Vec::new();
        let mut tried: HashSet<OrderId> = HashSet::new();
        for _ in 0..count {
            tokio::time::sleep(every).await;
            // While a node is being restarted there is nothing to read: another turn comes.
            let Ok(mut orders) = self.system.some_orders(self.sale).await else { continue };
            orders.retain(|(user, order)| places.contains_key(user) && !tried.contains(order));
            if orders.is_empty() {
                continue;
            }
            let (user, order) = orders[rng.random_range(0..orders.len())];
            tried.insert(order);
            let start = Instant::now();
            let heard = self.system.cancel(order, &self.buyers.tokens[places[&user]]).await;
            let (start_us, end_us) = (self.pulse.us(start), self.pulse.us(Instant::now()));
            let (action, order) = (Action::Cancel, Some(order));
            cancels.push(Attempt { action, sale: self.sale, user, start_us, end_us, heard, order });
        }
        cancels
    }
}

impl Over {
    /// What the buyers were told against what the ledger holds.
    pub(crate) fn report(&self, evidence: &Evidence, bench: &Bench<'_>) -> Storm {
        let mine = || {
            let buys = bench.history.iter().filter(|attempt| attempt.action == Action::Buy);
            buys.filter(|attempt| attempt.sale == self.sale)
        };
        let live: Vec<UserId> =
            evidence.ledger.orders.iter().filter(|row| row.live).map(|row| row.order.user).collect();
        let rows: HashSet<OrderId> = evidence.ledger.orders.iter().map(|row| row.order.id).collect();
        let owners: HashSet<UserId> = live.iter().copied().collect();
        let asked: HashSet<UserId> =
            mine().filter(|attempt| attempt.heard.may_have_row()).map(|attempt| attempt.user).collect();
        let confirmed: HashSet<OrderId> =
            mine().filter(|attempt| attempt.heard.is_yes()).filter_map(|attempt| attempt.order).collect();
        let (stock, buyers) = (bench.options.stock, bench.options.buyers);
        Storm {
            buyers,
            stock,
            tries: mine().count(),
            sold: live.len(),
            returned: self.returned,
            oversold: live.len().saturating_sub(stock),
            undersold: stock.min(buyers).saturating_sub(live.len()),
            duplicated: live.len() - owners.len(),
            lost: confirmed.difference(&rows).count(),
            unexpected: owners.difference(&asked).count(),
        }
    }
}
