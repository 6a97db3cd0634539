//! The load: many tasks that begin at the same moment, and the judgement of what they leave behind.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::error::{Error, Result};
use crate::measured::{Flaw, Measured};
use crate::meter::{Counters, lasting_keys};
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;

/// Requests that are under way at the same time.
pub const CONCURRENCY: usize = 64;
/// The longest latency that is told apart from longer ones.
const MAX_LATENCY_US: u64 = 60_000_000;
/// The stock of a race, and how many requests it has.
const RACE_STOCK: u64 = 8;
const RACE_REQUESTS: u64 = 16;

/// A version that sells. One value is one node.
pub trait Shop: Sized + Send + Sync + 'static {
    fn open(site: &Site) -> impl Future<Output = Result<Self>> + Send;

    /// One request of a user.
    fn buy(&self, user: u64) -> impl Future<Output = Result<Answer>> + Send;

    /// Waits until nothing is under way in the background.
    fn settle(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }

    /// Entries in memory that are left when no request is under way; `None` if it keeps none.
    fn leaked(&self) -> Option<u64> {
        None
    }
}

/// What a user is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    Bought,
    SoldOut,
    AlreadyBought,
    /// Another request was faster; the user may try again.
    Busy,
    /// The database did not accept the order.
    Rejected,
}

/// Who comes.
#[derive(Debug, Clone, Copy)]
pub struct Crowd {
    pub buyers: u64,
    /// Requests of each buyer.
    pub tries: u64,
    pub stock: u64,
}

impl Crowd {
    /// Different people who all want an item of too small a stock.
    pub const RACE_FOR_STOCK: Self = Self { buyers: RACE_REQUESTS, tries: 1, stock: RACE_STOCK };
    /// One person who sends many requests at once.
    pub const RACE_OF_ONE: Self = Self { buyers: 1, tries: RACE_REQUESTS, stock: RACE_STOCK };

    /// The users in the order of their requests.
    fn requests(&self, seed: u64) -> Vec<u64> {
        let mut requests: Vec<u64> = (0..self.tries).flat_map(|_| 1..=self.buyers).collect();
        requests.shuffle(&mut StdRng::seed_from_u64(seed));
        requests
    }
}

/// The answers to a crowd.
#[derive(Debug)]
pub struct Answers {
    pub requests: u64,
    pub elapsed: Duration,
    /// In microseconds.
    pub latencies: Histogram<u64>,
    pub given: HashMap<Answer, u64>,
    /// Users who were told that they have bought.
    pub bought: HashSet<u64>,
}

impl Answers {
    #[expect(clippy::cast_precision_loss, reason = "a count of one run")]
    pub fn orders_per_s(&self) -> f64 {
        self.given.get(&Answer::Bought).copied().unwrap_or(0) as f64 / self.elapsed.as_secs_f64()
    }
}

/// Provokes the race with a barrier between check and write, then runs the load of the options, and judges both.
pub async fn race_and_load<S: Shop>(lab: &Lab, version: &Version, race: Crowd, tries: u64) -> Result<Measured> {
    let mut measured = Measured::default();
    let callers = usize::try_from(race.buyers * race.tries).unwrap_or(usize::MAX);
    let site = lab.site(version, race.stock, RacePoint::of(callers, lab.attempt)).await?;
    let shop = Arc::new(S::open(&site).await?);
    let answers = send(&shop, race, lab.seed).await?;
    shop.settle().await?;
    judge(&site, race, &answers, &mut measured).await?;
    site.close().await;

    let load = Crowd { buyers: lab.options.buyers, tries, stock: lab.options.stock };
    let site = lab.site(version, load.stock, RacePoint::open()).await?;
    let shop = Arc::new(S::open(&site).await?);
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&shop, load, lab.seed).await?;
    shop.settle().await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    judge(&site, load, &answers, &mut measured).await?;
    if let Some(leaked) = shop.leaked() {
        measured.count(Flaw::Leaked, leaked, |count| format!("{count} entries left in memory"));
    }
    measured.count_lasting_keys(lab, &site).await?;
    site.close().await;
    Ok(measured)
}

/// Sends all requests of a crowd and waits for the answers.
pub async fn send<S: Shop>(shop: &Arc<S>, crowd: Crowd, seed: u64) -> Result<Answers> {
    let requests: Arc<[u64]> = crowd.requests(seed).into();
    let tasks = CONCURRENCY.min(requests.len());
    let (next, start) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(tasks + 1)));
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let (shop, requests, next, start) = (shop.clone(), requests.clone(), next.clone(), start.clone());
        running.spawn(async move {
            start.wait().await;
            let mut answers = Vec::new();
            while let Some(&user) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                let sent = Instant::now();
                let answer = shop.buy(user).await?;
                answers.push((user, answer, sent.elapsed()));
            }
            Ok::<_, Error>(answers)
        });
    }
    let begin = Instant::now();
    start.wait().await;
    let mut all = Answers {
        requests: requests.len() as u64,
        elapsed: Duration::ZERO,
        latencies: Histogram::new_with_max(MAX_LATENCY_US, 3).map_err(|error| Error::Failed(error.to_string()))?,
        given: HashMap::new(),
        bought: HashSet::new(),
    };
    while let Some(answers) = running.join_next().await {
        for (user, answer, latency) in answers.map_err(|error| Error::Failed(error.to_string()))?? {
            all.latencies.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
            *all.given.entry(answer).or_default() += 1;
            if answer == Answer::Bought {
                all.bought.insert(user);
            }
        }
    }
    all.elapsed = begin.elapsed();
    Ok(all)
}

/// Compares the orders in the database with the stock and with the answers.
pub async fn judge(site: &Site, crowd: Crowd, answers: &Answers, measured: &mut Measured) -> Result<()> {
    let rows: Vec<(u64, i64)> =
        sqlx::query_as("SELECT CAST(user_id AS UNSIGNED), COUNT(*) FROM orders GROUP BY user_id")
            .fetch_all(&site.db()?)
            .await?;
    let orders: u64 = rows.iter().map(|(_, count)| count.unsigned_abs()).sum();
    let users: HashSet<u64> = rows.iter().map(|(user, _)| *user).collect();
    let wanted = crowd.buyers.min(crowd.stock);
    let of = format!("{orders} orders for a stock of {}", crowd.stock);
    measured.count(Flaw::Oversold, orders.saturating_sub(crowd.stock), |_| of.clone());
    let refused = answers.requests - answers.given.get(&Answer::Bought).copied().unwrap_or(0);
    measured.count(Flaw::Undersold, wanted.saturating_sub(orders), |left| {
        format!("{left} of {} left, with {refused} requests refused", crowd.stock)
    });
    measured
        .count(Flaw::Duplicated, orders - users.len() as u64, |count| format!("orders beyond one per person: {count}"));
    let lost = answers.bought.difference(&users).count() as u64;
    measured.count(Flaw::Lost, lost, |count| format!("confirmed orders that do not exist: {count}"));
    Ok(())
}

impl Measured {
    /// Counts the keys of users and orders that the load has left in Redis for good.
    pub async fn count_lasting_keys(&mut self, lab: &Lab, site: &Site) -> Result<()> {
        if site.redis().is_ok() {
            let keys = lasting_keys(lab.servers.redis()?).await?;
            self.count(Flaw::Leaked, keys, |count| format!("{count} keys left in Redis that never expire"));
        }
        Ok(())
    }

    /// Takes the figures of the load.
    #[expect(clippy::cast_precision_loss, reason = "times of one run")]
    pub fn set_load(&mut self, answers: &Answers, counted: Counters) {
        self.orders_per_s = Some(answers.orders_per_s());
        self.p99_ms = Some(answers.latencies.value_at_quantile(0.99) as f64 / 1000.0);
        self.set_counted(answers.requests, counted);
    }

    /// Takes what was counted during these requests.
    #[expect(clippy::cast_precision_loss, reason = "counts of one run")]
    pub fn set_counted(&mut self, requests: u64, counted: Counters) {
        let per_request = |count: u64| count as f64 / requests as f64;
        self.requests = requests;
        self.sql_per_request = counted.sql.map(per_request);
        self.redis_per_request = counted.redis_executed.map(per_request);
        // Commands of other crates are executed but not counted as sent.
        let counted_all = counted.redis_sent.is_some_and(|sent| sent > 0 || counted.redis_executed == Some(0));
        self.redis_calls_per_request = counted.redis_sent.filter(|_| counted_all).map(per_request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_the_order_of_requests() {
        let crowd = Crowd { buyers: 100, tries: 2, stock: 10 };
        assert_eq!(crowd.requests(1), crowd.requests(1));
        assert_ne!(crowd.requests(1), crowd.requests(2));
        let sorted = |mut requests: Vec<u64>| {
            requests.sort_unstable();
            requests
        };
        assert_eq!(sorted(crowd.requests(1)), sorted(crowd.requests(2)), "the same requests");
    }
}
