//! How the waiting are told that a lock is free: one subscription for all locks of a client.
//!
//! A waiter joins before its last look, so that nothing is missed in between. After a broken connection everything is subscribed again
//! and the waiters look, because a message may have been missed; a waiter that misses one nevertheless looks again when the lease that
//! it waits for ends.
//!
//! However many wait for a lock, one of them looks: of those who exclude each other the first is woken by a message, and what one of
//! them has learned by looking holds for the others ([`Waiter::claim`]).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use redis::RedisResult;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::client::Config;
use crate::owner::Owner;
use stampede_redis::{Client, timeout_error};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const SWEEP: Duration = Duration::from_secs(1);

/// What a waiter waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Mode {
    /// To be the only one. With an owner: or one of its.
    Exclusive(Option<Owner>),
    /// To be one of many.
    Shared(Owner),
    /// To be called by name.
    Named(Owner),
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
    mode: Mode,
    told: Mutex<Option<Told>>,
    wake: Notify,
}

/// What is known of a lock without asking.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Known {
    /// Somebody holds it, and its lease ends then.
    Busy(Instant),
    /// One of ours is looking; if nothing is known by then, another should.
    Asked(Instant),
}

impl Known {
    /// When it is worth looking.
    pub(crate) fn look_at(self) -> Instant {
        match self {
            Self::Busy(at) | Self::Asked(at) => at,
        }
    }
}

#[derive(Debug, Default)]
struct Channel {
    /// In the order in which they came.
    waiting: Vec<Arc<Place>>,
    /// Is it subscribed?
    subscribed: watch::Sender<bool>,
    /// For those who wait to be the only one.
    known: Option<Known>,
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
    /// Was woken or looks for the others, and has not learned anything yet: if it leaves now, another must look.
    looking: AtomicBool,
}

impl Hub {
    pub(crate) fn new(config: &Config) -> Self {
        let (answer_within, ping_every) = (config.answer_within, config.watchdog_lease / 3);
        Self { channels: Mutex::default(), changed: Notify::new(), answer_within, ping_every }
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place among those who wait on the channel.
    pub(crate) fn join(self: &Arc<Self>, channel: &Arc<str>, mode: Mode, id: &Arc<str>) -> Waiter {
        let place = Arc::new(Place { id: id.clone(), mode, told: Mutex::new(None), wake: Notify::new() });
        let mut channels = self.channels();
        let known = channels.entry(channel.clone()).or_insert_with(|| {
            self.changed.notify_one();
            Channel::default()
        });
        known.waiting.push(place.clone());
        let subscribed = known.subscribed.subscribe();
        drop(channels);
        Waiter { hub: self.clone(), channel: channel.clone(), place, subscribed, looking: AtomicBool::new(false) }
    }

    /// Do its messages arrive already, because others wait for it?
    pub(crate) fn hears(&self, channel: &str) -> bool {
        self.channels().get(channel).is_some_and(|channel| *channel.subscribed.borrow())
    }

    /// The lock of this channel was got in this mode: those who may have it at the same time look.
    pub(crate) fn entered(&self, channel: &str, mode: &Mode) {
        let channels = self.channels();
        let Some(channel) = channels.get(channel) else { return };
        let enters = |place: &&Arc<Place>| match (mode, &place.mode) {
            (Mode::Shared(_), Mode::Shared(_)) => true,
            (mode, other) => mode.owner().is_some() && mode.owner() == other.owner(),
        };
        channel.waiting.iter().filter(enters).for_each(|place| place.tell(Told::Look));
    }

    /// Everybody looks, for whatever reason.
    pub(crate) fn wake_all(&self) {
        let channels = self.channels();
        channels.values().flat_map(|channel| &channel.waiting).for_each(|place| place.tell(Told::Look));
    }

    fn hear(&self, channel: &str, message: &str) {
        let mut channels = self.channels();
        let Some(channel) = channels.get_mut(channel) else { return };
        match message.split_once(' ') {
            // The first in line by its name, and for how many milliseconds it counts as alive.
            Some((name, alive_ms)) => {
                let later = Duration::from_millis(alive_ms.parse().unwrap_or(0));
                for place in &channel.waiting {
                    place.tell(if *place.id == *name { Told::Look } else { Told::LookIn(later) });
                }
            }
            None => match message.parse() {
                // So many milliseconds until the last reader's lease ends.
                Ok(ms) => channel.ends_in(Duration::from_millis(ms)),
                Err(_) => channel.tell_next(),
            },
        }
    }

    /// Listens for ever. While nobody waits there is no connection.
    pub(crate) async fn listen(self: Arc<Self>, link: Arc<Client>) {
        let mut pause = FIRST_PAUSE;
        loop {
            while self.channels().is_empty() {
                self.changed.notified().await;
            }
            let outcome = match link.pubsub().await {
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
            for channel in self.channels().values_mut() {
                channel.subscribed.send_replace(false);
                channel.known = None;
            }
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
        tokio::time::timeout(self.answer_within, work).await.unwrap_or_else(|_| Err(timeout_error()))
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
            if let Some(known) = self.channels().get_mut(&channel) {
                known.subscribed.send_replace(true);
                // Something may have been said before we listened.
                known.look_again();
            }
        }
        Ok(())
    }
}

impl Mode {
    fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Exclusive(owner) => owner.as_ref(),
            Self::Shared(owner) | Self::Named(owner) => Some(owner),
        }
    }
}

impl Channel {
    /// The lock is free: the first looks. If it can have the lock together with others, these look when it has it.
    fn tell_next(&self) {
        if let Some(place) = self.waiting.iter().find(|place| *place.told() != Some(Told::Look)) {
            place.tell(Told::Look);
        }
    }

    /// The last of several leases ends then.
    fn ends_in(&mut self, time: Duration) {
        let ends = Instant::now() + time;
        self.known = self.known.map(|known| Known::Busy(known.look_at().min(ends)));
        let alone = self.waiting.iter().filter(|place| matches!(place.mode, Mode::Exclusive(_)));
        alone.for_each(|place| place.tell(Told::LookIn(time)));
    }

    /// What is known may be out of date.
    fn look_again(&mut self) {
        self.known = None;
        let (alone, others): (Vec<_>, Vec<_>) =
            self.waiting.iter().partition(|place| matches!(place.mode, Mode::Exclusive(_)));
        // They share what they learn.
        alone.into_iter().take(1).chain(others).for_each(|place| place.tell(Told::Look));
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
                self.looking.fetch_or(told == Told::Look, Ordering::SeqCst);
                return told;
            }
        }
    }

    /// Has it been woken already?
    pub(crate) fn was_woken(&self) -> bool {
        let woken = self.place.told().take() == Some(Told::Look);
        self.looking.fetch_or(woken, Ordering::SeqCst);
        woken
    }

    /// For one who waits to be the only one: `None` if it should look now, and nobody else does so for a while; otherwise what another
    /// has learned.
    pub(crate) fn claim(&self, answer_within: Duration) -> Option<Known> {
        let now = Instant::now();
        let mut channels = self.hub.channels();
        let channel = channels.get_mut(&self.channel)?;
        let known = channel.known.filter(|known| known.look_at() > now);
        if known.is_none() {
            channel.known = Some(Known::Asked(now + answer_within));
            self.looking.store(true, Ordering::SeqCst);
        }
        known
    }

    /// A look has shown that the lock is busy for so long, and whether those who share it may have it.
    pub(crate) fn learned(&self, remaining: Duration, shared: bool) {
        let mut channels = self.hub.channels();
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        self.looking.store(false, Ordering::SeqCst);
        channel.known = Some(Known::Busy(Instant::now() + remaining));
        if shared {
            let sharing = channel.waiting.iter().filter(|place| matches!(place.mode, Mode::Shared(_)));
            sharing.for_each(|place| place.tell(Told::Look));
        }
    }

    /// Leaves with the lock in hand, which is held for at least so long unless it is released.
    pub(crate) fn done(self, lease: Duration) {
        self.place.told().take();
        self.learned(lease, false);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut channels = self.hub.channels();
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        channel.waiting.retain(|place| !Arc::ptr_eq(place, &self.place));
        if channel.waiting.is_empty() {
            channels.remove(&self.channel);
            self.hub.changed.notify_one();
        } else if self.looking.load(Ordering::SeqCst) || *self.place.told() == Some(Told::Look) {
            channel.known = None;
            channel.tell_next();
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("channel", &self.channel).finish_non_exhaustive()
    }
}
