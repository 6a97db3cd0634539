//! How the waiting are told that a lock is free: one subscription for all locks of a client.
//!
//! A waiter joins before its last look, so that nothing is missed in between. After a broken connection everything is subscribed anew
//! and everybody is woken, because a message may have been missed; whoever misses one nevertheless looks again when the lease that
//! it waits for ends.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use redis::RedisResult;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::client::Config;
use crate::owner::Owner;
use stampede_redis::{Link, too_late};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const SWEEP: Duration = Duration::from_secs(1);

/// Who is woken by a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// One of ours: only one can have the lock.
    One,
    /// All of ours: many may read.
    All,
    /// The one whose name the message tells.
    Named,
}

/// What a waiter is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    Look,
    /// Another's turn; look if it has not taken it by then.
    LookIn(Duration),
}

#[derive(Debug)]
struct Place {
    id: Arc<str>,
    owner: Owner,
    told: Mutex<Option<Told>>,
    wake: Notify,
}

#[derive(Debug)]
struct Channel {
    mode: Wake,
    /// In the order in which they came.
    waiting: Vec<Arc<Place>>,
    /// Is it subscribed?
    subscribed: watch::Sender<bool>,
}

type Channels = HashMap<Arc<str>, Channel>;

/// The waiters of a client.
#[derive(Debug)]
pub(crate) struct Hub {
    channels: Mutex<Channels>,
    /// A channel came or went.
    changed: Notify,
    answer_within: Duration,
    /// The connection is asked for a sign of life this often: one that is silent looks like one that has nothing to say.
    ping_every: Duration,
}

/// A place among those who wait for a lock. It is left by dropping it.
pub(crate) struct Waiter {
    hub: Arc<Hub>,
    channel: Arc<str>,
    place: Arc<Place>,
    subscribed: watch::Receiver<bool>,
    /// Has the lock, so that there is nothing to hand on.
    done: bool,
}

impl Hub {
    pub(crate) fn new(config: &Config) -> Self {
        let (answer_within, ping_every) = (config.answer_within, config.watchdog_lease / 3);
        Self { channels: Mutex::default(), changed: Notify::new(), answer_within, ping_every }
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(self: &Arc<Self>, channel: &Arc<str>, mode: Wake, id: &Arc<str>, owner: &Owner) -> Waiter {
        let place =
            Arc::new(Place { id: id.clone(), owner: owner.clone(), told: Mutex::new(None), wake: Notify::new() });
        let mut channels = self.channels();
        let known = channels.entry(channel.clone()).or_insert_with(|| {
            self.changed.notify_one();
            Channel { mode, waiting: Vec::new(), subscribed: watch::Sender::new(false) }
        });
        known.waiting.push(place.clone());
        let subscribed = known.subscribed.subscribe();
        drop(channels);
        Waiter { hub: self.clone(), channel: channel.clone(), place, subscribed, done: false }
    }

    fn hear(&self, channel: &str, message: &str) {
        let channels = self.channels();
        let Some(channel) = channels.get(channel) else { return };
        match channel.mode {
            Wake::One => channel.tell_one(),
            // A number: so many milliseconds until it may be free.
            Wake::All => match message.parse() {
                Ok(ms) => channel.waiting.iter().for_each(|place| place.tell(Told::LookIn(Duration::from_millis(ms)))),
                Err(_) => channel.tell_all(),
            },
            Wake::Named => {
                let (name, alive_ms) = message.split_once(' ').unwrap_or((message, ""));
                let later = Duration::from_millis(alive_ms.parse().unwrap_or(0));
                for place in &channel.waiting {
                    place.tell(if *place.id == *name { Told::Look } else { Told::LookIn(later) });
                }
            }
        }
    }

    /// Listens for ever. While nobody waits there is no connection.
    pub(crate) async fn listen(self: Arc<Self>, link: Arc<Link>) {
        let mut pause = FIRST_PAUSE;
        loop {
            while self.channels().is_empty() {
                self.changed.notified().await;
            }
            let outcome = match link.listen().await {
                Ok(connection) => {
                    let (sink, messages) = connection.split();
                    self.serve(sink, messages, &mut pause).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = outcome {
                tracing::debug!(%error, "no subscription; trying again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            self.channels().values().for_each(|channel| _ = channel.subscribed.send_replace(false));
        }
    }

    /// Serves one connection until it breaks, or until nobody has needed it for a while.
    async fn serve(&self, mut sink: PubSubSink, mut messages: PubSubStream, pause: &mut Duration) -> RedisResult<()> {
        let mut subscribed = HashSet::new();
        // What nobody waits for any more is given up late: the next waiter is often near.
        let mut sweep = tokio::time::interval(SWEEP);
        let mut ping = tokio::time::interval_at(Instant::now() + self.ping_every, self.ping_every);
        self.subscribe(&mut sink, &mut subscribed).await?;
        *pause = FIRST_PAUSE;
        loop {
            tokio::select! {
                message = messages.next() => match message {
                    Some(message) => {
                        let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or_default();
                        self.hear(message.get_channel_name(), text);
                    }
                    None => return Ok(()),
                },
                () = self.changed.notified() => self.subscribe(&mut sink, &mut subscribed).await?,
                _ = sweep.tick() => {
                    let idle: Vec<Arc<str>> = {
                        let channels = self.channels();
                        subscribed.extract_if(|channel| !channels.contains_key(channel)).collect()
                    };
                    if subscribed.is_empty() {
                        return Ok(());
                    }
                    for channel in idle {
                        self.in_time(sink.unsubscribe(&*channel)).await?;
                    }
                }
                _ = ping.tick() => self.in_time(sink.ping::<redis::Value>()).await.map(drop)?,
            }
        }
    }

    async fn in_time<T>(&self, work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        tokio::time::timeout(self.answer_within, work).await.unwrap_or_else(|_| Err(too_late()))
    }

    /// Subscribes what is waited for and not subscribed yet.
    async fn subscribe(&self, sink: &mut PubSubSink, subscribed: &mut HashSet<Arc<str>>) -> RedisResult<()> {
        let fresh: Vec<Arc<str>> = {
            let channels = self.channels();
            let fresh = channels.iter().filter(|(_, channel)| !*channel.subscribed.borrow());
            fresh.map(|(name, _)| name.clone()).collect()
        };
        for channel in fresh {
            if !subscribed.contains(&channel) {
                self.in_time(sink.subscribe(&*channel)).await?;
                subscribed.insert(channel.clone());
            }
            if let Some(known) = self.channels().get(&channel) {
                known.subscribed.send_replace(true);
                // Something may have been said before we listened.
                known.tell_all();
            }
        }
        Ok(())
    }
}

impl Channel {
    fn tell_one(&self) {
        if let Some(place) = self.waiting.iter().find(|place| place.told().is_none()) {
            place.tell(Told::Look);
        }
    }

    fn tell_all(&self) {
        self.waiting.iter().for_each(|place| place.tell(Told::Look));
    }
}

impl Place {
    fn told(&self) -> MutexGuard<'_, Option<Told>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, what: Told) {
        let mut told = self.told();
        if *told != Some(Told::Look) {
            *told = Some(what);
        }
        drop(told);
        self.wake.notify_one();
    }
}

impl Waiter {
    /// Waits until messages arrive, or until it makes no sense to wait for that: looking again helps, too.
    pub(crate) async fn ready(&mut self, within: Duration) {
        let _ = tokio::time::timeout(within, self.subscribed.wait_for(|subscribed| *subscribed)).await;
    }

    /// Waits for a word.
    pub(crate) async fn told(&self) -> Told {
        loop {
            self.place.wake.notified().await;
            // Cancelled between these two lines, it stays told, and hands on when it leaves.
            if let Some(told) = self.place.told().take() {
                return told;
            }
        }
    }

    /// Forgets what it was told so far: it is about to look anyway.
    pub(crate) fn forget(&self) {
        self.place.told().take();
    }

    /// Leaves with the lock in hand.
    pub(crate) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut channels = self.hub.channels();
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        channel.waiting.retain(|place| !Arc::ptr_eq(place, &self.place));
        if self.done {
            // Who has the same owner may enter, too.
            let same = channel.waiting.iter().filter(|place| place.owner == self.place.owner);
            same.for_each(|place| place.tell(Told::Look));
        }
        if channel.waiting.is_empty() {
            channels.remove(&self.channel);
            self.hub.changed.notify_one();
        } else if !self.done && channel.mode == Wake::One {
            // Perhaps it was told, and did not get round to it.
            channel.tell_one();
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("channel", &self.channel).finish_non_exhaustive()
    }
}
