//! Ids from a counter in Redis: 31 bits of seconds since 2022-01-01 UTC, 32 bits of a number from a counter per business prefix and UTC day.
//!
//! A task fetches blocks of numbers ahead (`lua/grant.lua`), and asks once a second for the present second by the clock of Redis. An id
//! consists of the second that was granted last and the next number of a block, so making one never waits. When no number is left, or no
//! second was granted for [`MAX_AGE`], no id is made.
//!
//! | key | type | holds | written by | deleted by |
//! |---|---|---|---|---|
//! | `stampede:L:ids:P:DATE` | hash | `series`, `server` (its run id and replication id), `from` (first second of the series), `second` (last granted one), `used` (last granted number) | `grant` | expires two days after its day |
//!
//! `L` is the id of the ledger, `P` the business prefix (`order` or `other`).
//!
//! # Why an id never repeats
//!
//! A *series* is a time in which Redis has not lost anything about a day's counter. Every number and every second is granted in a series of
//! a day, and an id is made only of a second and a number of the same series. So it is enough that
//!
//! 1. *no number is granted twice in a series*, because `used` only rises in it. Whatever could lower it begins a new series: a missing
//!    key (`FLUSHALL`, a restart without its data, an eviction); another run id or replication id of the server, which change with
//!    every restart and promotion (the data may be those of an older copy); a caller that was granted a later second than the key
//!    knows (the key was restored by other means).
//! 2. *no second is granted in two series of a day*, because a series grants only seconds from `from` on, which is later than the time at
//!    which it began, and the series before it granted nothing after that time. So after a restart of Redis the next second is awaited.
//! 3. *no second belongs to two days*: a second is granted only on the day of its counter.
//!
//! It does not matter when a node uses what it was granted: a block that was fetched in an earlier second or in a series that has ended
//! meanwhile, by a node that was paused or cut off, is used with a second of its own series, and only with that.
//!
//! The clock of Redis is used for 2 only. While Redis has its data, a clock that goes back is ignored until it has caught up (`second`). If
//! Redis loses its data *and* its clock is behind what it was, or another server with a clock that is behind takes over, seconds could be
//! granted again. The nodes prevent that by telling the last second that they were granted; it remains possible if the first one to
//! ask was granted less than another. The same is true of an old master that goes on serving some nodes beside the new one. Then, as always,
//! the primary keys of the ledger refuse an id that exists.

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{FromRedisValue as _, RedisError};
use stampede_core::Timestamp;
use stampede_core::ids::counter::{DAY_S, EPOCH_S, MAX_AGE};
use stampede_core::ids::{IdGenerator, LeaseEnded};
use stampede_core::{Clock as _, SystemClock};
use stampede_redis::{Backoff, Client, CommandError, Script};
use tokio::sync::{Notify, watch};

use super::blocks::{Block, Blocks, Series};

pub(super) const GRANT: &str = include_str!("lua/grant.lua");

/// Numbers that are fetched at once.
const BLOCK: u32 = 8192;
/// The next block is fetched when fewer numbers are left.
const LOW_WATER_MARK: u32 = BLOCK / 2;
/// The counter of the next day is begun this long before midnight, so that its first second need not be awaited.
const PREPARE_S: i64 = 30;
/// How often the day may turn out to be another one before the answer counts as unusable.
const MAX_DAYS_TRIED: usize = 3;
const SECOND: Duration = Duration::from_secs(1);
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// Makes the ids of one business prefix.
#[derive(Debug)]
pub(super) struct RedisCounter {
    blocks: Arc<Blocks>,
    /// Notified when few numbers are left.
    low: Arc<Notify>,
    /// Whether a second was ever granted.
    usable: watch::Receiver<bool>,
}

impl RedisCounter {
    /// Returns the generator, and the task that fetches for it.
    pub(super) fn new(client: Arc<Client>, key_prefix: String) -> (Arc<Self>, impl Future<Output = ()> + use<>) {
        let (sender, usable) = watch::channel(false);
        let fetcher = Fetcher::new(client, Script::new(GRANT), key_prefix, sender);
        Self::with(fetcher, usable)
    }

    pub(super) fn with(
        fetcher: Fetcher,
        usable: watch::Receiver<bool>,
    ) -> (Arc<Self>, impl Future<Output = ()> + use<>) {
        let counter = Self { blocks: fetcher.blocks().clone(), low: fetcher.low.clone(), usable };
        (Arc::new(counter), fetcher.run())
    }

    /// Waits until the first second was granted.
    pub(super) async fn wait_until_usable(&self) {
        // An error means that the task has ended, which it does only at the end of the process.
        let _ = self.usable.clone().wait_for(|usable| *usable).await;
    }

    pub(super) fn is_usable(&self) -> bool {
        self.blocks.is_usable(Instant::now())
    }
}

impl IdGenerator for RedisCounter {
    fn next(&self) -> Result<i64, LeaseEnded> {
        let (id, left) = self.blocks.next(Instant::now())?;
        if left < LOW_WATER_MARK {
            self.low.notify_one();
        }
        Ok(id)
    }
}

/// The answer of Redis.
#[derive(Debug, Clone, Copy)]
struct Granted {
    /// Seconds since 2022, and microseconds.
    now: i64,
    micros: u32,
    /// The first second of the series.
    from: i64,
    series: u64,
    /// The last number of the block.
    last: u32,
    count: u32,
}

impl Granted {
    const fn today(&self) -> i64 {
        self.now.div_euclid(DAY_S)
    }

    const fn block(&self, day: i64) -> Block {
        Block::new(Series { day, name: self.series }, self.last, self.count)
    }
}

/// When to ask again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// After this time, or earlier if few numbers are left.
    In(Duration),
    /// After this time: there are no more numbers, or the first second of the series has not come.
    NotBefore(Duration),
}

/// Fetches blocks and seconds.
#[derive(Debug)]
pub(super) struct Fetcher {
    client: Arc<Client>,
    grant: Script,
    key_prefix: String,
    blocks: Arc<Blocks>,
    low: Arc<Notify>,
    usable: watch::Sender<bool>,
    /// Days since 2022.
    day: i64,
    /// The last series of that day.
    series: Option<Series>,
    /// The day whose counter was begun ahead.
    prepared: Option<i64>,
    /// The day whose numbers are used up.
    exhausted: Option<i64>,
}

impl Fetcher {
    pub(super) fn new(client: Arc<Client>, grant: Script, key_prefix: String, usable: watch::Sender<bool>) -> Self {
        let (blocks, low) = (Arc::default(), Arc::default());
        // The first guess; the answer of Redis tells its day.
        let day = (SystemClock.now().ms() / 1000 - EPOCH_S).div_euclid(DAY_S);
        Self { client, grant, key_prefix, blocks, low, usable, day, series: None, prepared: None, exhausted: None }
    }

    pub(super) fn blocks(&self) -> &Arc<Blocks> {
        &self.blocks
    }

    async fn run(mut self) {
        let mut backoff = Backoff::new(Duration::from_millis(20), SECOND);
        let mut is_failing = false;
        loop {
            match self.fetch().await {
                Ok(next) => {
                    if std::mem::take(&mut is_failing) {
                        tracing::info!(keys = self.key_prefix, "ids are fetched from Redis again");
                    }
                    backoff.reset();
                    match next {
                        Next::NotBefore(pause) => tokio::time::sleep(pause).await,
                        // Both a notification and the timeout start the next round.
                        Next::In(pause) => drop(tokio::time::timeout(pause, self.low.notified()).await),
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(keys = self.key_prefix, %error, "cannot fetch ids from Redis; trying again");
                    }
                    backoff.sleep().await;
                }
            }
        }
    }

    /// Asks for the present second, and for numbers if few are left.
    pub(super) async fn fetch(&mut self) -> Result<Next, CommandError> {
        for _ in 0..MAX_DAYS_TRIED {
            let wanted = self.wanted();
            let until = Instant::now() + MAX_AGE;
            let granted = self.ask(self.day, wanted).await?;
            if granted.today() == self.day {
                self.store(&granted, until);
                if granted.count < wanted && self.exhausted.replace(self.day) != Some(self.day) {
                    tracing::error!(
                        keys = self.key_prefix,
                        "the ids of this day are used up; the next day begins at midnight UTC"
                    );
                }
                self.prepare_tomorrow(&granted).await?;
                return Ok(next_round(&granted, wanted));
            }
            (self.day, self.series) = (granted.today(), None);
        }
        Err(CommandError::Unknown(std::io::Error::other("the day of Redis changes with every answer").into()))
    }

    fn wanted(&self) -> u32 {
        let left = self.series.map_or(0, |series| self.blocks.remaining(series));
        if left < LOW_WATER_MARK { BLOCK } else { 0 }
    }

    fn store(&mut self, granted: &Granted, until: Instant) {
        let series = Series { day: self.day, name: granted.series };
        if self.series.replace(series).is_some_and(|before| before != series) {
            tracing::warn!(
                keys = self.key_prefix,
                wait_s = granted.from - granted.now,
                "Redis was restarted or has lost its counter of ids; new ids begin with a later second"
            );
        }
        self.blocks.add(granted.block(self.day));
        if granted.now >= granted.from {
            self.blocks.permit(series, granted.now, until);
            self.usable.send_replace(true);
        }
    }

    /// Begins the counter of the next day shortly before it is needed.
    async fn prepare_tomorrow(&mut self, granted: &Granted) -> Result<(), CommandError> {
        let tomorrow = self.day + 1;
        if tomorrow * DAY_S - granted.now > PREPARE_S || self.prepared == Some(tomorrow) {
            return Ok(());
        }
        let ahead = self.ask(tomorrow, BLOCK).await?;
        self.blocks.add(ahead.block(tomorrow));
        self.prepared = Some(tomorrow);
        Ok(())
    }

    async fn ask(&self, day: i64, wanted: u32) -> Result<Granted, CommandError> {
        let new_series: u64 = rand::random();
        let args =
            [day.to_string(), wanted.to_string(), new_series.to_string(), self.blocks.highest_second().to_string()];
        let reply = self.client.eval(&self.grant, &[self.key(day)], &args).await?;
        let (now, micros, from, series, last, count) = <(i64, u32, i64, u64, u32, u32)>::from_redis_value(reply)
            .map_err(|error| CommandError::Unknown(RedisError::from(error)))?;
        Ok(Granted { now, micros, from, series, last, count })
    }

    /// The key of a day's counter.
    fn key(&self, day: i64) -> String {
        let date = Timestamp::from_ms((day * DAY_S + EPOCH_S) * 1000).to_string();
        format!("{}:{}", self.key_prefix, date.get(..10).unwrap_or(&date))
    }
}

/// The next round is at the beginning of the next second.
fn next_round(granted: &Granted, wanted: u32) -> Next {
    let elapsed = Duration::from_micros(granted.micros.into());
    let pause = SECOND.saturating_sub(elapsed) + SHORTEST_PAUSE;
    let is_exhausted = wanted > 0 && granted.count == 0;
    if is_exhausted || granted.now < granted.from { Next::NotBefore(pause) } else { Next::In(pause) }
}
