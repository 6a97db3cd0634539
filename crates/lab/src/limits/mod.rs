//! Limits, ids and sessions.
//!
//! In order: [`no_limit`], [`sliding_window`]; ids by [`redis_counter`], [`blocks`], [`snowflake`]; [`session_in_process`],
//! [`session_in_redis`]. This file has the loads that they go through.

pub mod blocks;
pub mod no_limit;
pub mod redis_counter;
pub mod session_in_process;
pub mod session_in_redis;
pub mod sliding_window;
pub mod snowflake;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::driver::{Answer, Crowd, Shop, send};
use crate::measured::{Flaw, Measured};
use crate::meter::Counters;
use crate::race::RacePoint;
use crate::run::Lab;
use crate::site::Site;
use crate::version::Version;
use crate::{Error, Result};

pub const VERSIONS: &[&Version] = &[
    &no_limit::VERSION,
    &sliding_window::VERSION,
    &redis_counter::VERSION,
    &blocks::VERSION,
    &snowflake::VERSION,
    &session_in_process::VERSION,
    &session_in_redis::VERSION,
];

/// How many requests of one user may pass per second.
pub const LIMIT: u64 = 10;
/// How many requests one user sends at least: many more than the limit allows while they are sent.
const MIN_FLOOD: u64 = 200;
/// Ids are made by this many tasks, each of which makes so many.
const ID_TASKS: u64 = 300;
const IDS_PER_TASK: u64 = 100;

/// One user sends as fast as they can, and then every user sends once.
#[expect(clippy::cast_precision_loss, reason = "counts of one run")]
async fn one_user_floods<S: Shop>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let shop = Arc::new(S::open(&site).await?);
    let before = Counters::read(&lab.servers, &site).await?;
    let flood = Crowd { buyers: 1, tries: lab.options.buyers.max(MIN_FLOOD), stock: 0 };
    let flood = send(&shop, flood, lab.seed).await?;
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_load(&flood, counted);
    measured.orders_per_s = None;
    let passed = flood.given.get(&Answer::Bought).copied().unwrap_or(0);
    // A window may begin at any moment, so a span of n seconds touches n + 1 windows.
    let allowed = LIMIT * (flood.elapsed.as_secs() + 2);
    measured.count(Flaw::Overload, passed.saturating_sub(allowed), |_| {
        format!("{passed} of {} requests of one user passed in {:.1} s", flood.requests, flood.elapsed.as_secs_f64())
    });
    let honest = Crowd { buyers: 100, tries: 1, stock: 0 };
    let answers = send(&shop, honest, lab.seed).await?;
    // The one who has flooded may still be refused.
    let refused = honest.buyers - answers.bought.len() as u64;
    measured.count(Flaw::Undersold, refused.saturating_sub(1), |count| format!("{count} other users were refused"));
    measured.figures.push(("requests of one user that passed", passed as f64));
    measured.count_lasting_keys(lab, &site).await?;
    site.close().await;
    Ok(measured)
}

/// Makes ids. One value is one node.
pub trait IdMaker: Sized + Send + Sync + 'static {
    fn open(site: &Site, node: u64) -> impl Future<Output = Result<Self>> + Send;
    fn next(&self) -> impl Future<Output = Result<u64>> + Send;
}

/// 300 tasks with 100 ids each, on two nodes.
#[expect(clippy::cast_precision_loss, reason = "counts of one run")]
async fn make_ids<M: IdMaker>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let nodes = [Arc::new(M::open(&site, 1).await?), Arc::new(M::open(&site, 2).await?)];
    let start = Arc::new(Barrier::new(usize::try_from(ID_TASKS).unwrap_or(0) + 1));
    let mut tasks = JoinSet::new();
    for task in 0..ID_TASKS {
        let (maker, start) = (nodes[usize::from(task.is_multiple_of(2))].clone(), start.clone());
        tasks.spawn(async move {
            start.wait().await;
            let mut ids = Vec::new();
            for _ in 0..IDS_PER_TASK {
                ids.push(maker.next().await?);
            }
            Ok::<_, Error>(ids)
        });
    }
    let before = Counters::read(&lab.servers, &site).await?;
    start.wait().await;
    let begin = Instant::now();
    let mut ids = HashSet::new();
    while let Some(made) = tasks.join_next().await {
        ids.extend(made.map_err(|error| Error::Failed(error.to_string()))??);
    }
    let elapsed = begin.elapsed();
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    let all = ID_TASKS * IDS_PER_TASK;
    measured.set_counted(all, counted);
    measured.figures.push(("ms for 30,000 ids", elapsed.as_secs_f64() * 1000.0));
    measured.figures.push(("ids per second", all as f64 / elapsed.as_secs_f64()));
    measured.count(Flaw::Duplicated, all - ids.len() as u64, |count| format!("{count} ids twice"));
    measured.count_lasting_keys(lab, &site).await?;
    site.close().await;
    Ok(measured)
}

/// Remembers who is logged in. One value is one node.
pub trait Sessions: Sized + Send + Sync + 'static {
    fn open(site: &Site) -> impl Future<Output = Result<Self>> + Send;
    fn log_in(&self, user: u64) -> impl Future<Output = Result<String>> + Send;
    fn user(&self, token: &str) -> impl Future<Output = Result<Option<u64>>> + Send;

    /// Entries in memory that nothing ever removes; `None` if it keeps none there.
    fn leaked(&self) -> Option<u64> {
        None
    }
}

/// Users log in at one node, and their next request arrives at the other.
async fn two_nodes<S: Sessions>(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let site = lab.site(version, 0, RacePoint::open()).await?;
    let (first, second) = (S::open(&site).await?, S::open(&site).await?);
    let before = Counters::read(&lab.servers, &site).await?;
    let (users, mut refused) = (lab.options.buyers.min(500), 0);
    for user in 1..=users {
        let token = first.log_in(user).await?;
        refused += u64::from(second.user(&token).await? != Some(user));
        if second.user("forged").await?.is_some() {
            return Err(Error::Failed("a forged token was accepted".to_owned()));
        }
    }
    let counted = Counters::read(&lab.servers, &site).await?.since(before);
    measured.set_counted(users, counted);
    measured.count(Flaw::LoggedOut, refused, |count| format!("{count} of {users} users refused at the other node"));
    if let Some(leaked) = first.leaked() {
        measured.count(Flaw::Leaked, leaked, |count| format!("{count} sessions in memory that never expire"));
    }
    measured.count_lasting_keys(lab, &site).await?;
    site.close().await;
    Ok(measured)
}
