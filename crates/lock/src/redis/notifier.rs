//! Wakes waiters when a lock is released: one pub/sub subscription for all locks of a client.
//!
//! A waiter registers before its last check, so that it misses no message in between. After a broken connection every channel is
//! subscribed again and the waiters check, because a message may have been missed. A waiter that misses a message nevertheless checks when
//! the lease that it waits for expires.
//!
//! However many waiters a lock has, one of them checks at a time: a message wakes the first of the waiters that exclude each other, and the
//! result of its check holds for the others ([`Waiter::claim_check`]).

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use redis::RedisResult;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::locks::{Config, new_backoff};
use super::owner::Owner;
use stampede_redis::{Backoff, Client, timeout_error};

/// How often channels without waiters are unsubscribed.
const UNSUBSCRIBE_INTERVAL: Duration = Duration::from_secs(1);

/// What a waiter waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// To be the only holder, or one of the leases of this owner.
    Exclusive(Option<Owner>),
    /// To be one of many readers.
    Shared(Owner),
    /// To be first in the queue of a fair lock.
    Queued(Owner),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wakeup {
    /// Check the lock now.
    Check,
    /// It is another waiter's turn; check if that waiter has not taken the lock by then.
    CheckIn(Duration),
}

#[derive(Debug)]
struct WaiterState {
    id: Arc<str>,
    mode: WaitMode,
    wakeup: Mutex<Option<Wakeup>>,
    notify: Notify,
}

/// What is known about a lock without asking Redis.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LastCheck {
    /// The lock is held by a lease that expires then.
    BusyUntil(Instant),
    /// A waiter of this client is checking. If it has not reported by then, another waiter should check.
    PendingUntil(Instant),
}

impl LastCheck {
    /// When the next check is worthwhile.
    pub(crate) fn retry_at(self) -> Instant {
        match self {
            Self::BusyUntil(at) | Self::PendingUntil(at) => at,
        }
    }
}

#[derive(Debug, Default)]
struct Channel {
    /// In order of arrival.
    waiters: Vec<Arc<WaiterState>>,
    subscribed: watch::Sender<bool>,
    /// Valid for exclusive waiters.
    last_check: Option<LastCheck>,
}

type Channels = HashMap<Arc<str>, Channel>;

/// The waiters of a client.
#[derive(Debug)]
pub(crate) struct Notifier {
    channels: Mutex<Channels>,
    /// Signalled when a channel is added or removed.
    changed: Notify,
    response_timeout: Duration,
    /// How often the connection is pinged: a broken connection looks like one without messages.
    ping_interval: Duration,
}

/// A registered waiter for a lock. Dropping it unregisters it.
pub(crate) struct Waiter {
    notifier: Arc<Notifier>,
    channel: Arc<str>,
    state: Arc<WaiterState>,
    subscribed: watch::Receiver<bool>,
    /// It was woken or checks for the others, and has not reported a result yet: if it is dropped now, another waiter must check.
    checking: AtomicBool,
}

impl Notifier {
    pub(crate) fn new(config: &Config) -> Self {
        let (response_timeout, ping_interval) = (config.response_timeout, config.watchdog_ttl / 3);
        Self { channels: Mutex::default(), changed: Notify::new(), response_timeout, ping_interval }
    }

    /// Registers a waiter on the channel.
    pub(crate) fn register(self: &Arc<Self>, name: &Arc<str>, mode: WaitMode, id: &Arc<str>) -> Waiter {
        let state = Arc::new(WaiterState { id: id.clone(), mode, wakeup: Mutex::new(None), notify: Notify::new() });
        let mut channels = self.channels.lock();
        let channel = channels.entry(name.clone()).or_insert_with(|| {
            self.changed.notify_one();
            Channel::default()
        });
        channel.waiters.push(state.clone());
        let subscribed = channel.subscribed.subscribe();
        drop(channels);
        Waiter { notifier: self.clone(), channel: name.clone(), state, subscribed, checking: AtomicBool::new(false) }
    }

    /// Whether the messages of the channel arrive already, because other waiters have subscribed it.
    pub(crate) fn is_subscribed(&self, channel: &str) -> bool {
        self.channels.lock().get(channel).is_some_and(|channel| *channel.subscribed.borrow())
    }

    /// The lock of this channel was acquired in this mode: waiters that may hold it at the same time check.
    pub(crate) fn notify_acquired(&self, channel: &str, mode: &WaitMode) {
        let channels = self.channels.lock();
        let Some(channel) = channels.get(channel) else { return };
        let compatible = |waiter: &&Arc<WaiterState>| match (mode, &waiter.mode) {
            (WaitMode::Shared(_), WaitMode::Shared(_)) => true,
            (mode, other) => mode.owner().is_some() && mode.owner() == other.owner(),
        };
        channel.waiters.iter().filter(compatible).for_each(|waiter| waiter.wake(Wakeup::Check));
    }

    /// Makes every waiter check.
    pub(crate) fn wake_all(&self) {
        let channels = self.channels.lock();
        channels.values().flat_map(|channel| &channel.waiters).for_each(|waiter| waiter.wake(Wakeup::Check));
    }

    fn handle_message(&self, channel: &str, message: &str) {
        let mut channels = self.channels.lock();
        let Some(channel) = channels.get_mut(channel) else { return };
        match message.split_once(' ') {
            // The id of the first queued waiter, and the milliseconds until its queue entry expires.
            Some((first, alive_ms)) => {
                let later = Duration::from_millis(alive_ms.parse().unwrap_or(0));
                for waiter in &channel.waiters {
                    waiter.wake(if *waiter.id == *first { Wakeup::Check } else { Wakeup::CheckIn(later) });
                }
            }
            None => match message.parse() {
                // The milliseconds until the lease of the last reader expires.
                Ok(ms) => channel.set_busy_for(Duration::from_millis(ms)),
                Err(_) => channel.wake_next(),
            },
        }
    }

    /// Receives messages until the task is aborted. While there are no waiters, there is no connection.
    pub(crate) async fn run(self: Arc<Self>, client: Arc<Client>) {
        let mut backoff = new_backoff();
        loop {
            while self.channels.lock().is_empty() {
                self.changed.notified().await;
            }
            let result = match client.pubsub().await {
                Ok(connection) => {
                    let (sink, messages) = connection.split();
                    self.serve(sink, messages, &mut backoff).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                tracing::debug!(%error, "the pub/sub connection failed; reconnecting");
                backoff.sleep().await;
            }
            for channel in self.channels.lock().values_mut() {
                channel.subscribed.send_replace(false);
                channel.last_check = None;
            }
        }
    }

    /// Serves one connection until it breaks, or until it has had no waiters for a while.
    async fn serve(&self, mut sink: PubSubSink, mut messages: PubSubStream, backoff: &mut Backoff) -> RedisResult<()> {
        let mut subscribed = HashSet::new();
        // Channels without waiters are unsubscribed late, because the next waiter often follows soon.
        let mut unsubscribe = tokio::time::interval(UNSUBSCRIBE_INTERVAL);
        let mut ping = tokio::time::interval_at(Instant::now() + self.ping_interval, self.ping_interval);
        self.subscribe(&mut sink, &mut subscribed).await?;
        backoff.reset();
        loop {
            tokio::select! {
                message = messages.next() => match message {
                    Some(message) => {
                        let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or_default();
                        self.handle_message(message.get_channel_name(), text);
                    }
                    None => return Ok(()),
                },
                () = self.changed.notified() => self.subscribe(&mut sink, &mut subscribed).await?,
                _ = unsubscribe.tick() => {
                    let unused: Vec<Arc<str>> = {
                        let channels = self.channels.lock();
                        subscribed.extract_if(|channel| !channels.contains_key(channel)).collect()
                    };
                    if subscribed.is_empty() {
                        return Ok(());
                    }
                    for channel in unused {
                        self.with_timeout(sink.unsubscribe(&*channel)).await?;
                    }
                }
                _ = ping.tick() => self.with_timeout(sink.ping::<redis::Value>()).await.map(drop)?,
            }
        }
    }

    async fn with_timeout<T>(&self, future: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
        tokio::time::timeout(self.response_timeout, future).await.unwrap_or_else(|_| Err(timeout_error()))
    }

    /// Subscribes the channels that have waiters and are not subscribed yet.
    async fn subscribe(&self, sink: &mut PubSubSink, subscribed: &mut HashSet<Arc<str>>) -> RedisResult<()> {
        let missing: Vec<Arc<str>> = {
            let channels = self.channels.lock();
            let missing = channels.iter().filter(|(_, channel)| !*channel.subscribed.borrow());
            missing.map(|(name, _)| name.clone()).collect()
        };
        for name in missing {
            if !subscribed.contains(&name) {
                self.with_timeout(sink.subscribe(&*name)).await?;
                subscribed.insert(name.clone());
            }
            if let Some(channel) = self.channels.lock().get_mut(&name) {
                channel.subscribed.send_replace(true);
                // A message may have been published before the subscription.
                channel.recheck();
            }
        }
        Ok(())
    }
}

impl WaitMode {
    fn owner(&self) -> Option<&Owner> {
        match self {
            Self::Exclusive(owner) => owner.as_ref(),
            Self::Shared(owner) | Self::Queued(owner) => Some(owner),
        }
    }
}

impl Channel {
    /// The lock is free: the first waiter checks. If it can share the lock with others, those check once it has acquired it.
    fn wake_next(&self) {
        if let Some(waiter) = self.waiters.iter().find(|waiter| *waiter.wakeup.lock() != Some(Wakeup::Check)) {
            waiter.wake(Wakeup::Check);
        }
    }

    /// The last of several leases expires after this time.
    fn set_busy_for(&mut self, time: Duration) {
        let until = Instant::now() + time;
        self.last_check = self.last_check.map(|check| LastCheck::BusyUntil(check.retry_at().min(until)));
        let exclusive = self.waiters.iter().filter(|waiter| matches!(waiter.mode, WaitMode::Exclusive(_)));
        exclusive.for_each(|waiter| waiter.wake(Wakeup::CheckIn(time)));
    }

    /// The last check may be outdated.
    fn recheck(&mut self) {
        self.last_check = None;
        let (exclusive, others): (Vec<_>, Vec<_>) =
            self.waiters.iter().partition(|waiter| matches!(waiter.mode, WaitMode::Exclusive(_)));
        // Exclusive waiters share the result of one check.
        exclusive.into_iter().take(1).chain(others).for_each(|waiter| waiter.wake(Wakeup::Check));
    }
}

impl WaiterState {
    fn wake(&self, new: Wakeup) {
        let mut wakeup = self.wakeup.lock();
        if *wakeup != Some(Wakeup::Check) {
            *wakeup = Some(new);
        }
        drop(wakeup);
        self.notify.notify_one();
    }
}

impl Waiter {
    /// Waits until the channel is subscribed, at most for this time: without a subscription, checking again still works.
    pub(crate) async fn subscribed(&mut self, timeout: Duration) {
        let _ = tokio::time::timeout(timeout, self.subscribed.wait_for(|subscribed| *subscribed)).await;
    }

    /// Waits for a wake-up.
    pub(crate) async fn wakeup(&self) -> Wakeup {
        loop {
            self.state.notify.notified().await;
            // If the future is dropped before the next line, the wake-up stays set, and dropping the waiter passes it on.
            if let Some(wakeup) = self.state.wakeup.lock().take() {
                self.checking.fetch_or(wakeup == Wakeup::Check, Ordering::SeqCst);
                return wakeup;
            }
        }
    }

    /// Takes a pending wake-up. Returns `true` if it should check.
    pub(crate) fn take_wakeup(&self) -> bool {
        let check = self.state.wakeup.lock().take() == Some(Wakeup::Check);
        self.checking.fetch_or(check, Ordering::SeqCst);
        check
    }

    /// For exclusive waiters: `None` if this waiter should check now, on behalf of all of them; otherwise the last check.
    pub(crate) fn claim_check(&self, response_timeout: Duration) -> Option<LastCheck> {
        let now = Instant::now();
        let mut channels = self.notifier.channels.lock();
        let channel = channels.get_mut(&self.channel)?;
        let last_check = channel.last_check.filter(|check| check.retry_at() > now);
        if last_check.is_none() {
            channel.last_check = Some(LastCheck::PendingUntil(now + response_timeout));
            self.checking.store(true, Ordering::SeqCst);
        }
        last_check
    }

    /// Reports that the lock is busy for this time. With `shared`, readers hold it, so that waiting readers may check.
    pub(crate) fn report_busy(&self, remaining: Duration, shared: bool) {
        let mut channels = self.notifier.channels.lock();
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        self.checking.store(false, Ordering::SeqCst);
        channel.last_check = Some(LastCheck::BusyUntil(Instant::now() + remaining));
        if shared {
            let readers = channel.waiters.iter().filter(|waiter| matches!(waiter.mode, WaitMode::Shared(_)));
            readers.for_each(|waiter| waiter.wake(Wakeup::Check));
        }
    }

    /// Unregisters after acquiring the lock, which stays busy for at least this time unless it is released.
    pub(crate) fn acquired(self, ttl: Duration) {
        self.state.wakeup.lock().take();
        self.report_busy(ttl, false);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut channels = self.notifier.channels.lock();
        let Some(channel) = channels.get_mut(&self.channel) else { return };
        channel.waiters.retain(|waiter| !Arc::ptr_eq(waiter, &self.state));
        if channel.waiters.is_empty() {
            channels.remove(&self.channel);
            self.notifier.changed.notify_one();
        } else if self.checking.load(Ordering::SeqCst) || *self.state.wakeup.lock() == Some(Wakeup::Check) {
            channel.last_check = None;
            channel.wake_next();
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("channel", &self.channel).finish_non_exhaustive()
    }
}
