//! Reading shops through a cache in Redis.
//!
//! In order: [`cache_aside`], [`delete_first`], [`database_first`], [`empty_values`], [`bloom_filter`], [`mutex_rebuild`],
//! [`logical_expiry`], [`no_jitter`], [`jitter`], [`two_levels`]. This file has the reads that they go through.

pub mod bloom_filter;
pub mod cache_aside;
pub mod database_first;
pub mod delete_first;
pub mod empty_values;
pub mod jitter;
pub mod logical_expiry;
pub mod mutex_rebuild;
pub mod no_jitter;
pub mod two_levels;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use redis::AsyncCommands as _;
use tokio::task::JoinSet;

use crate::driver::{Answer, Crowd, Shop, send};
use crate::measured::{Flaw, Measured};
use crate::meter::{Counters, executed_statements};
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;
use crate::{Error, Result};

pub const VERSIONS: &[&Version] = &[
    &cache_aside::VERSION,
    &delete_first::VERSION,
    &database_first::VERSION,
    &empty_values::VERSION,
    &bloom_filter::VERSION,
    &mutex_rebuild::VERSION,
    &logical_expiry::VERSION,
    &no_jitter::VERSION,
    &jitter::VERSION,
    &two_levels::VERSION,
];

/// Shops that exist.
pub const SHOPS: u64 = 200;
/// How long a shop is cached in most versions.
pub const EXPIRY: Duration = Duration::from_millis(200);
/// The query of all versions. It takes as many seconds as the shop costs, so that readers come while it runs.
pub const QUERY: &str = "SELECT name FROM shop WHERE id = ? AND SLEEP(cost) = 0";
/// The shop that everyone reads.
const HOT: u64 = 1;
/// Reads of a version per buyer of the options: 10,000 by default.
const READS_PER_BUYER: u64 = 5;
/// Reads of missing shops at most: one for each of a thousand shops reaches the database, and all of them are read before the first empty
/// value expires.
const MAX_MISSING_READS: u64 = 10_000;
/// Of so many reads of missing shops, one is the first of its shop.
const READS_PER_MISSING_SHOP: u64 = 10;
/// Reads of missing shops in a version whose subject is another one. Each costs a query.
const FEW_READS: u64 = 1_000;
/// How often the hot shop expires, and how many read it then.
const EXPIRIES: u64 = 5;
const READERS: u64 = 64;
/// When all shops expire: how long they are read, by one reader each, at this interval; and the window in which the calls of the database are
/// counted. It must not get those of a third of the shops. A higher peak counts if it repeats.
const EXPIRY_SPAN: Duration = Duration::from_secs(3);
const READ_INTERVAL: Duration = Duration::from_millis(25);
const WINDOW: Duration = Duration::from_millis(100);
#[expect(clippy::cast_precision_loss, reason = "a number of shops")]
const MAX_PEAK: f64 = SHOPS as f64 / 3.0;
const ROUNDS: u32 = 2;
/// The name of the figure.
pub const CALLS_AT_EXPIRY: &str = "most database calls in 100 ms when all shops expire";
/// How long the steps of a change may take.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// A way to read shops.
pub trait Reader: Sized + Send + Sync + 'static {
    fn open(site: &Site) -> impl Future<Output = Result<Self>> + Send;
    fn read(&self, id: u64) -> impl Future<Output = Result<Option<String>>> + Send;

    /// Waits until nothing is under way in the background.
    fn settle(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }
}

/// A reader that can change a shop. Passes `site.race` between its two steps.
pub trait Writer: Reader {
    fn rename(&self, id: u64, name: &str) -> impl Future<Output = Result<()>> + Send;
}

/// A site with shops.
async fn shops(lab: &Lab, version: &Version, race: RacePoint) -> Result<Site> {
    let site = lab.site(version, 0, race).await?;
    let db = site.db()?;
    sqlx::query("CREATE TABLE shop (id BIGINT PRIMARY KEY, name VARCHAR(64) NOT NULL, cost DOUBLE NOT NULL)")
        .execute(&db)
        .await?;
    let insert = "INSERT INTO shop SELECT seq, CONCAT('shop ', seq), 0.03 FROM seq_1_to_200";
    sqlx::query(insert).execute(&db).await?;
    Ok(site)
}

/// A cache as a whole: missing shops must not all reach the database, nor all readers of a shop that has just expired.
async fn hot_missing_expired<R: Reader>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let reads = missing_reads(lab.options.buyers);
    let calls = count_calls::<R>(lab, version, reads, Expiry::Awaited, &mut measured).await?;
    measured.count(Flaw::Overload, u64::from(calls.missing > reads / 2), |_| {
        format!("{} database calls for {reads} reads of shops that do not exist", calls.missing)
    });
    measured.count(Flaw::Overload, u64::from(calls.expired > EXPIRIES * READERS / 8), |_| {
        format!("{} database calls after {EXPIRIES} expiries of one shop", calls.expired)
    });
    Ok(measured)
}

/// Reads of missing shops, for this many buyers.
const fn missing_reads(buyers: u64) -> u64 {
    let reads = buyers * READS_PER_BUYER;
    if reads < MAX_MISSING_READS { reads } else { MAX_MISSING_READS }
}

/// The figures of a version whose subject is another one, which is otherwise plain cache-aside with a longer expiry.
async fn note_calls<R: Reader>(lab: &Lab, version: &Version, measured: &mut Measured) -> Result<()> {
    let reads = FEW_READS.min(lab.options.buyers * READS_PER_BUYER);
    count_calls::<R>(lab, version, reads, Expiry::Removed, measured).await.map(drop)
}

/// How the hot shop expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expiry {
    /// After [`EXPIRY`].
    Awaited,
    /// The lab removes its key.
    Removed,
}

/// Database calls for reads of shops that do not exist, and of a shop that has just expired.
struct Calls {
    missing: u64,
    expired: u64,
}

/// Reads a hot shop, shops that do not exist, and a shop that has just expired, and notes the figures.
async fn count_calls<R: Reader>(
    lab: &Lab,
    version: &Version,
    missing_reads: u64,
    expiry: Expiry,
    measured: &mut Measured,
) -> Result<Calls> {
    let (site, reader) = open::<R>(lab, version).await?;
    let reads = lab.options.buyers * READS_PER_BUYER;
    let hot = Arc::new(Reads { reader: reader.clone(), ids: Ids::Hot });
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&hot, Crowd { buyers: reads, tries: 1, stock: 0 }, lab.seed).await?;
    reader.settle().await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    measured.orders_per_s = None;
    measured.figures.push(("reads per second of a hot shop", per_second(&answers)));
    let calls = counted.sql.unwrap_or_default();
    measured.figures.push(("database calls per 10,000 reads of a hot shop", per_10_000(calls, reads)));

    let missing = Arc::new(Reads { reader: reader.clone(), ids: Ids::Missing(missing_reads / READS_PER_MISSING_SHOP) });
    let before = Counters::read(&lab.servers, &site).await?;
    send(&missing, Crowd { buyers: missing_reads, tries: 1, stock: 0 }, lab.seed).await?;
    reader.settle().await?;
    let missing = Counters::read(&lab.servers, &site).await?.since(before).sql.unwrap_or_default();
    let per_read = per_10_000(missing, missing_reads);
    measured.figures.push(("database calls per 10,000 reads of missing shops", per_read));

    let mut expired = 0;
    for _ in 0..EXPIRIES {
        match expiry {
            Expiry::Awaited => tokio::time::sleep(EXPIRY + EXPIRY / 2).await,
            Expiry::Removed => {
                let _: u64 = site.redis()?.del(key(HOT)).await?;
            }
        }
        let before = Counters::read(&lab.servers, &site).await?;
        send(&hot, Crowd { buyers: READERS, tries: 1, stock: 0 }, lab.seed).await?;
        reader.settle().await?;
        expired += Counters::read(&lab.servers, &site).await?.since(before).sql.unwrap_or_default();
    }
    let per_read = per_10_000(expired, EXPIRIES * READERS);
    measured.figures.push(("database calls per 10,000 reads of an expired shop", per_read));
    site.close().await;
    Ok(Calls { missing, expired })
}

async fn open<R: Reader>(lab: &Lab, version: &Version) -> Result<(Site, Arc<R>)> {
    let site = shops(lab, version, RacePoint::open()).await?;
    let reader = Arc::new(R::open(&site).await?);
    // A wrong answer would make the figures meaningless.
    for _ in 0..2 {
        let found = (reader.read(HOT).await?, reader.read(SHOPS + 1).await?);
        if found != (Some("shop 1".to_owned()), None) {
            return Err(Error::Failed(format!("read {found:?}")));
        }
    }
    reader.settle().await?;
    Ok((site, reader))
}

/// The shop is changed while another task reads it. Afterwards the new name must be read.
async fn change_while_reading<W: Writer>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = shops(lab, version, RacePoint::within(2, CHANGE_TIMEOUT)).await?;
    let reader = Arc::new(W::open(&site).await?);
    reader.read(HOT).await?;
    let changing = tokio::spawn({
        let reader = reader.clone();
        async move { reader.rename(HOT, "new").await }
    });
    site.race.arrived(1).await;
    reader.read(HOT).await?;
    site.race.pass().await;
    changing.await.map_err(|error| Error::Failed(error.to_string()))??;
    let read = reader.read(HOT).await?;
    let stale = u64::from(read.as_deref() != Some("new"));
    measured
        .count(Flaw::Stale, stale, |_| format!("{:?} is read after the change to \"new\"", read.unwrap_or_default()));
    site.close().await;
    note_calls::<W>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// All shops are cached at the same time and then read until each has expired. They must not all reach the database at the same time.
async fn expiry_of_all<R: Reader>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let mut peak = f64::INFINITY;
    // A moment in which the machine stands still makes a peak too. That one does not repeat.
    for _ in 0..ROUNDS {
        peak = peak.min(peak_of_expiry::<R>(lab, version).await?);
        if peak <= MAX_PEAK {
            break;
        }
    }
    measured.figures.push((CALLS_AT_EXPIRY, peak));
    measured.count(Flaw::Overload, u64::from(peak > MAX_PEAK), |_| {
        format!("{peak:.0} database calls in 100 ms for {SHOPS} shops that were cached together")
    });
    note_calls::<R>(lab, version, &mut measured).await?;
    Ok(measured)
}

/// The most database calls in a window while all shops expire, each of which is read again and again by one reader.
async fn peak_of_expiry<R: Reader>(lab: &Lab, version: &Version) -> Result<f64> {
    let site = shops(lab, version, RacePoint::open()).await?;
    // Quick queries: all shops are cached, and loaded again, within one window.
    sqlx::query("UPDATE shop SET cost = 0").execute(&site.db()?).await?;
    let reader = Arc::new(R::open(&site).await?);
    let all = Arc::new(Reads { reader: reader.clone(), ids: Ids::Each });
    send(&all, Crowd { buyers: SHOPS, tries: 1, stock: 0 }, lab.seed).await?;

    let end = Instant::now() + EXPIRY_SPAN;
    let mut readers = JoinSet::new();
    for id in 1..=SHOPS {
        let reader = reader.clone();
        readers.spawn(async move {
            while Instant::now() < end {
                tokio::time::sleep(READ_INTERVAL).await;
                reader.read(id).await?;
            }
            Ok::<_, Error>(())
        });
    }
    let admin = &lab.servers.mariadb()?.admin;
    let (mut peak, mut begin, mut before) = (0.0_f64, Instant::now(), executed_statements(admin).await?);
    while begin < end {
        tokio::time::sleep(WINDOW).await;
        let next = Instant::now();
        let now = executed_statements(admin).await?;
        // Reading the counter is a statement too.
        let calls = now.saturating_sub(before).saturating_sub(1);
        // A window is longer than planned if the machine is busy.
        #[expect(clippy::cast_precision_loss, reason = "a number of calls")]
        let per_window = calls as f64 / begin.elapsed().div_duration_f64(WINDOW);
        peak = peak.max(per_window);
        (begin, before) = (next, now);
    }
    while let Some(read) = readers.join_next().await {
        read.map_err(|error| Error::Failed(error.to_string()))??;
    }
    site.close().await;
    Ok(peak)
}

/// The key of a shop.
pub fn key(id: u64) -> String {
    format!("shop:{id}")
}

fn per_second(answers: &crate::driver::Answers) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a number of reads")]
    let reads = answers.requests as f64;
    reads / answers.elapsed.as_secs_f64()
}

fn per_10_000(calls: u64, reads: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "numbers of reads")]
    let (calls, reads) = (calls as f64, reads as f64);
    calls * 10_000.0 / reads
}

/// What is read.
enum Ids {
    Hot,
    /// One of this many shops that do not exist.
    Missing(u64),
    /// Each shop once.
    Each,
}

/// A reader as the target of a load.
struct Reads<R> {
    reader: Arc<R>,
    ids: Ids,
}

impl<R: Reader> Shop for Reads<R> {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { reader: Arc::new(R::open(site).await?), ids: Ids::Hot })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let id = match self.ids {
            Ids::Hot => HOT,
            Ids::Missing(count) => 1_000_000 + StdRng::seed_from_u64(user).random_range(0..count.max(1)),
            Ids::Each => user,
        };
        self.reader.read(id).await?;
        Ok(Answer::Bought)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long an empty value stays, in the versions that have them.
    const EMPTY_EXPIRY: Duration = Duration::from_secs(5);
    /// What a query takes, and how many run at the same time.
    const QUERY_TIME: Duration = Duration::from_millis(30);
    const CONNECTIONS: u32 = 32;

    /// Otherwise, empty values would expire while they are read, and a sound version would ask the database far too often.
    #[test]
    fn missing_shops_are_all_read_before_an_empty_value_expires() {
        assert_eq!([16, 2_000].map(missing_reads), [80, 10_000]);
        let most = missing_reads(1_000_000);
        let shops = u32::try_from(most / READS_PER_MISSING_SHOP).unwrap();
        assert!(shops * QUERY_TIME / CONNECTIONS < EMPTY_EXPIRY / 4, "{most} reads of {shops} missing shops");
    }
}
