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
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use redis::AsyncCommands as _;

use crate::driver::{Answer, Crowd, Shop, send};
use crate::measured::{Flaw, Measured};
use crate::meter::Counters;
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
/// The query of all versions. It is costly, so that readers come while it runs.
pub const QUERY: &str = "SELECT name FROM shop WHERE id = ? AND SLEEP(0.03) = 0";
/// The shop that everyone reads.
const HOT: u64 = 1;
/// Reads of a version per buyer of the options: 10,000 by default.
const READS_PER_BUYER: u64 = 5;
/// How often the hot shop expires, and how many read it then.
const EXPIRIES: u64 = 5;
const READERS: u64 = 64;
/// How long the steps of a change may take.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// A way to read shops.
pub trait Reader: Sized + Send + Sync + 'static {
    fn open(site: &Site) -> impl Future<Output = Result<Self>> + Send;
    fn read(&self, id: u64) -> impl Future<Output = Result<Option<String>>> + Send;
}

/// A reader that can change a shop. Passes `site.race` between its two steps.
pub trait Writer: Reader {
    fn rename(&self, id: u64, name: &str) -> impl Future<Output = Result<()>> + Send;
}

/// A site with shops.
async fn shops(lab: &Lab, version: &Version, race: RacePoint) -> Result<Site> {
    let site = lab.site(version, 0, race).await?;
    let db = site.db()?;
    sqlx::query("CREATE TABLE shop (id BIGINT PRIMARY KEY, name VARCHAR(64) NOT NULL)").execute(&db).await?;
    let insert = "INSERT INTO shop SELECT seq, CONCAT('shop ', seq) FROM seq_1_to_200";
    sqlx::query(insert).execute(&db).await?;
    Ok(site)
}

/// Reads of a hot shop, of shops that do not exist, and of a shop that has just expired.
async fn hot_missing_expired<R: Reader>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let reads = lab.options.buyers * READS_PER_BUYER;
    let crowd = Crowd { buyers: reads, tries: 1, stock: 0 };

    let (site, reader) = open::<R>(lab, version).await?;
    let hot = Arc::new(Reads { reader: reader.clone(), ids: Ids::Hot });
    let before = Counters::read(&lab.servers, &site).await?;
    let answers = send(&hot, crowd, lab.seed).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&answers, counted);
    measured.orders_per_s = None;
    measured.figures.push(("reads per second of a hot shop", per_second(&answers)));
    measured.figures.push(("database calls per 10,000 reads of a hot shop", per_10_000(counted, reads)));

    let missing = Arc::new(Reads { reader: reader.clone(), ids: Ids::Missing(reads / 10) });
    let before = Counters::read(&lab.servers, &site).await?;
    send(&missing, crowd, lab.seed).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    let calls = counted.sql.unwrap_or_default();
    measured.figures.push(("database calls per 10,000 reads of missing shops", per_10_000(counted, reads)));
    measured.count(Flaw::Overload, u64::from(calls > reads / 2), |_| {
        format!("{calls} database calls for {reads} reads of shops that do not exist")
    });

    let mut calls = 0;
    for _ in 0..EXPIRIES {
        tokio::time::sleep(EXPIRY + EXPIRY / 2).await;
        let before = Counters::read(&lab.servers, &site).await?;
        send(&hot, Crowd { buyers: READERS, tries: 1, stock: 0 }, lab.seed).await?;
        calls += Counters::read(&lab.servers, &site).await?.since(before).sql.unwrap_or_default();
    }
    let counted = Counters { sql: Some(calls), ..Counters::default() };
    measured
        .figures
        .push(("database calls per 10,000 reads of an expired shop", per_10_000(counted, EXPIRIES * READERS)));
    measured.count(Flaw::Overload, u64::from(calls > EXPIRIES * READERS / 8), |_| {
        format!("{calls} database calls after {EXPIRIES} expiries of one shop")
    });
    site.close().await;
    Ok(measured)
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
    measured.requests = 3;
    site.close().await;
    Ok(measured)
}

/// All shops are cached at the same time. They must not all expire at the same time.
async fn expiries_in_one_second<R: Reader>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = shops(lab, version, RacePoint::open()).await?;
    let reader = Arc::new(Reads { reader: Arc::new(R::open(&site).await?), ids: Ids::Each });
    send(&reader, Crowd { buyers: SHOPS, tries: 1, stock: 0 }, lab.seed).await?;
    let mut redis = site.redis()?;
    let mut expiries: Vec<u64> = Vec::new();
    for id in 1..=SHOPS {
        expiries.push(redis.expire_time(key(id)).await?);
    }
    let with_the_same = |second: &u64| expiries.iter().filter(|other| *other == second).count() as u64;
    let together = expiries.iter().map(with_the_same).max().unwrap_or_default();
    #[expect(clippy::cast_precision_loss, reason = "a number of shops")]
    measured.figures.push(("shops that expire in the same second", together as f64));
    measured.requests = SHOPS;
    measured.count(Flaw::Overload, u64::from(together > SHOPS / 3), |_| {
        format!("{together} of {SHOPS} cached shops expire in the same second")
    });
    site.close().await;
    Ok(measured)
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

fn per_10_000(counted: Counters, reads: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "numbers of reads")]
    let (calls, reads) = (counted.sql.unwrap_or_default() as f64, reads as f64);
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
