//! The locks of one Redis.
//!
//! What a lock named `stock` with the prefix `lock` keeps in Redis. The braces keep all of it on one node of a cluster.
//!
//! | key | holds | written by | goes |
//! |---|---|---|---|
//! | `lock:{stock}` | the simple lock: a string, the hold; the others: a hash of the owner, the fence and every hold | the holder | with the release or the lease |
//! | `lock:{stock}:fence` | the last fencing token | every first acquire | [`Config::fence_memory`] after the last acquire |
//! | `lock:{stock}:readers` | a sorted set of readers by the end of their leases | readers | with the last reader |
//! | `lock:{stock}:line`, `lock:{stock}:living` | who waits for the fair lock, in order; until when each counts as alive | those who wait | with the last who waits |
//!
//! The channel `lock:{stock}:freed` tells those who wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::hold::{Gone, Named};
use crate::lock::Lock;
use crate::owner::Owner;
use crate::scripts::Kind;
use crate::told::Hub;
use crate::watchdog::Watchdog;
use stampede_redis::{Client, CommandError, Servers, timeout_error};

/// How locks behave. [`Default`] is right for most.
#[derive(Debug, Clone)]
pub struct Config {
    /// The first part of every key.
    pub prefix: String,
    /// The lease of locks that are taken without one. It is renewed every third of it for as long as the guard lives; if the process
    /// dies, the lock is free after this time at the latest.
    pub watchdog_lease: Duration,
    /// How long connecting to Redis may take.
    pub connect_within: Duration,
    /// How long Redis may take to answer. What is not answered by then is unknown.
    pub answer_within: Duration,
    /// How long the last fencing token of an unused lock is remembered. If Redis' clock goes back by more than this, tokens may repeat.
    pub fence_memory: Duration,
    /// How many replicas must confirm that they have a lock before it counts as acquired or renewed (`WAIT`); 0: none. With it, a lock
    /// that was acquired survives the loss of the master, if a replica that confirmed takes over, and a master that is cut off from its
    /// replicas gives and renews no locks. It costs a round trip to the replicas, and while a replica is away, every lock. See
    /// [`promises`](crate::promises).
    pub replicas: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prefix: "lock".to_owned(),
            watchdog_lease: Duration::from_secs(30),
            connect_within: Duration::from_secs(1),
            answer_within: Duration::from_secs(1),
            fence_memory: Duration::from_secs(24 * 60 * 60),
            replicas: 0,
        }
    }
}

const MAX_FENCE_MEMORY: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);
/// How many abandoned holds are cleared up with patience at once. More get one try each.
const MAX_ABANDONED: usize = 16_384;
/// What was sent may be carried out late, after a look that found nothing: so much later there is a second.
const SECOND_LOOK: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Clearing up goes on for at least so long.
const CLEAR_WITHIN: Duration = Duration::from_secs(60);
/// How long [`Locks::close`] waits.
const CLOSE_WITHIN: Duration = Duration::from_secs(10);

/// The locks of one Redis: one connection, one subscription and one watchdog for all of them. Cheap to clone.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// use stampede_lock::{Config, Locks};
///
/// let locks = Locks::connect(url, Config::default()).await?;
/// let report = locks.simple("nightly-report")?;
/// let guard = report.lock().await?;
/// assert!(report.try_lock().await.is_err(), "held");
/// guard.release().await?;
/// assert!(report.try_lock().await.is_ok());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Locks {
    shared: Arc<Shared>,
}

/// What all locks of a client share.
pub(crate) struct Shared {
    pub(crate) link: Arc<Client>,
    pub(crate) hub: Arc<Hub>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) config: Config,
    runtime: Handle,
    abandoned: Arc<Semaphore>,
    /// How many releases are under way in the background.
    releasing: watch::Sender<usize>,
    closed: AtomicBool,
    tasks: [AbortHandle; 2],
}

impl Locks {
    /// Connects, and fails if Redis does not answer.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`], [`Error::Setting`].
    pub async fn connect(servers: impl Into<Servers>, config: Config) -> Result<Self> {
        let locks = Self::new(servers, config)?;
        locks.ping().await?;
        Ok(locks)
    }

    /// Connects when the first lock is asked for.
    ///
    /// # Errors
    /// [`Error::Setting`].
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn new(servers: impl Into<Servers>, config: Config) -> Result<Self> {
        check_lease(config.watchdog_lease)?;
        if !(Duration::from_millis(1)..=MAX_FENCE_MEMORY).contains(&config.fence_memory) {
            return Err(Error::setting("the memory of the fence must be between a millisecond and ten years"));
        }
        let runtime = Handle::current();
        let link = Client::new(servers.into(), config.connect_within, config.answer_within);
        let link = link.map_err(|error| Error::setting(format!("the servers' addresses cannot be used: {error}")))?;
        let link = Arc::new(link);
        let (hub, watchdog) = (Arc::new(Hub::new(&config)), Arc::new(Watchdog::new(&config)));
        let listening = runtime.spawn(hub.clone().listen(link.clone())).abort_handle();
        let renewing = runtime.spawn(watchdog.clone().run(link.clone())).abort_handle();
        let (abandoned, tasks) = (Arc::new(Semaphore::new(MAX_ABANDONED)), [listening, renewing]);
        let (releasing, closed) = (watch::Sender::new(0), AtomicBool::new(false));
        let shared = Shared { link, hub, watchdog, config, runtime, abandoned, releasing, closed, tasks };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Does Redis answer?
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`].
    pub async fn ping(&self) -> Result<()> {
        self.shared.link.send(redis::cmd("PING")).await?;
        Ok(())
    }

    /// For the end of a program: waits until the guards that were dropped are released, at most ten seconds. A runtime that ends before
    /// leaves their locks to their leases. Whoever still waits for a lock, or asks for one from now on, gets [`Error::Closed`]; guards
    /// that are in hand stay as they are.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks};
    /// let locks = Locks::connect(url, Config::default()).await?;
    /// let guard = locks.simple("report")?.lock().await?;
    /// drop(guard);
    /// locks.close().await?; // the next process need not wait for the lease to end
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unreachable`] if some are not released by then: they end with their leases.
    pub async fn close(&self) -> Result<()> {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.hub.wake_all();
        let mut releasing = self.shared.releasing.subscribe();
        let ended = tokio::time::timeout(CLOSE_WITHIN, releasing.wait_for(|&number| number == 0)).await;
        ended.map(drop).map_err(|_| Error::Unreachable(timeout_error()))
    }

    /// The plainest lock: one command to get it, one to give it back. Not re-entrant, no fencing token.
    ///
    /// # Errors
    /// [`Error::Setting`] if the name cannot be used, here and below.
    pub fn simple(&self, name: &str) -> Result<Lock> {
        self.lock(Kind::Simple, name, Owner::new())
    }

    /// A lock that its owner may enter again; it is free when every guard is released.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks, Owner};
    /// # let locks = Locks::connect(url, Config::default()).await?;
    /// let (me, you) = (Owner::new(), Owner::new());
    /// let outer = locks.reentrant("account", &me)?.lock().await?;
    /// let inner = locks.reentrant("account", &me)?.lock().await?;
    /// assert_eq!(outer.fence(), inner.fence());
    /// outer.release().await?;
    /// assert!(locks.reentrant("account", &you)?.try_lock().await.is_err(), "still held");
    /// inner.release().await?;
    /// assert!(locks.reentrant("account", &you)?.try_lock().await.is_ok());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As with [`simple`](Self::simple).
    pub fn reentrant(&self, name: &str, owner: &Owner) -> Result<Lock> {
        self.lock(Kind::Reentrant, name, owner.clone())
    }

    /// A re-entrant lock that serves in the order of arrival, over all processes. Who dies while waiting is passed over when its place
    /// has had no sign of life for [`Config::watchdog_lease`].
    ///
    /// # Errors
    /// As with [`simple`](Self::simple).
    pub fn fair(&self, name: &str, owner: &Owner) -> Result<Lock> {
        self.lock(Kind::Fair, name, owner.clone())
    }

    /// Many readers or one writer.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks, Owner};
    /// # let locks = Locks::connect(url, Config::default()).await?;
    /// let (mine, yours) = (locks.read_write("page", &Owner::new())?, locks.read_write("page", &Owner::new())?);
    /// let writing = mine.write().lock().await?;
    /// assert!(yours.read().try_lock().await.is_err());
    /// let reading = mine.downgrade(writing).await?;
    /// let both = yours.read().lock().await?;
    /// # reading.release().await?;
    /// # both.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As with [`simple`](Self::simple).
    pub fn read_write(&self, name: &str, owner: &Owner) -> Result<ReadWrite> {
        let read = self.lock(Kind::Read, name, owner.clone())?;
        Ok(ReadWrite { read, write: self.lock(Kind::Write, name, owner.clone())? })
    }

    /// How many holds and places in line are renewed now.
    pub fn watched(&self) -> usize {
        self.shared.watchdog.watched()
    }

    fn lock(&self, kind: Kind, name: &str, owner: Owner) -> Result<Lock> {
        // The part in braces decides on which node of a cluster a key is; if it is empty, every key would go its own way.
        if name.is_empty() || name.starts_with('}') {
            return Err(Error::setting("a lock's name must not be empty or begin with a brace"));
        }
        let main = format!("{}:{{{name}}}", self.shared.config.prefix);
        let channel = format!("{main}:freed").into();
        let more = kind.more_keys().iter().map(|part| format!("{main}:{part}"));
        let keys = std::iter::once(main.clone()).chain(more).collect();
        Ok(Lock::new(self.shared.clone(), Named { kind, keys, channel }, owner))
    }
}

/// A lock for many readers or one writer, re-entrant for its owner. Who writes may also read; who reads must release before writing.
///
/// Readers that keep coming can keep a writer waiting.
#[derive(Debug, Clone)]
pub struct ReadWrite {
    read: Lock,
    write: Lock,
}

impl ReadWrite {
    /// The lock to read under.
    pub fn read(&self) -> &Lock {
        &self.read
    }

    /// The lock to write under.
    pub fn write(&self) -> &Lock {
        &self.write
    }

    /// From writing to reading, with no writer in between.
    ///
    /// # Errors
    /// As [`Lock::try_lock`] and [`Guard::release`](crate::Guard::release). The write lock is released in any case.
    pub async fn downgrade(&self, writing: crate::Guard) -> Result<crate::Guard> {
        let reading = self.read.try_lock().await?;
        writing.release().await?;
        Ok(reading)
    }
}

impl Shared {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Releases in the background; [`Locks::close`] waits for it.
    pub(crate) fn spawn<T: Send + 'static>(&self, release: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        let under_way = UnderWay::new(&self.releasing);
        self.runtime.spawn(async move {
            let outcome = release.await;
            drop(under_way);
            outcome
        })
    }

    /// Clears up in the background what Redis may know under this id. `doubtful`: something unanswered may be carried out late.
    pub(crate) fn abandon(self: Arc<Self>, lock: Arc<Named>, id: Arc<str>, lease: Duration, doubtful: bool) {
        let place = self.abandoned.clone().try_acquire_owned().ok();
        // On a runtime that is shutting down this does nothing, and the lease ends it.
        let shared = self.clone();
        self.spawn(async move {
            let until = if place.is_some() { Instant::now() + lease.max(CLEAR_WITHIN) } else { Instant::now() };
            shared.clear_up(&lock, &id, until, doubtful).await;
            drop(place);
        });
    }

    async fn clear_up(&self, lock: &Named, id: &str, until: Instant, doubtful: bool) {
        let mut pause = Duration::from_millis(10);
        let mut looked = false;
        loop {
            match lock.release(&self.link, id).await {
                Ok(Gone::Released) if !doubtful => return,
                Ok(_) if looked || Instant::now() >= until => return,
                Ok(_) => {
                    looked = true;
                    tokio::time::sleep(SECOND_LOOK).await;
                }
                Err(CommandError::Refused(error)) => {
                    tracing::warn!(%error, "a lock could not be released; it ends with its lease");
                    return;
                }
                Err(failure) if Instant::now() >= until => {
                    tracing::warn!(?failure, "a lock could not be released; it ends with its lease");
                    return;
                }
                Err(_) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
}

/// Counts what is under way, also if its task ends early.
struct UnderWay(watch::Sender<usize>);

impl UnderWay {
    fn new(number: &watch::Sender<usize>) -> Self {
        number.send_modify(|number| *number += 1);
        Self(number.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.send_modify(|number| *number -= 1);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

pub(crate) fn check_lease(lease: Duration) -> Result<()> {
    if (Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60)).contains(&lease) {
        return Ok(());
    }
    Err(Error::setting("a lease must be between 10 milliseconds and a day"))
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Locks")
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}
