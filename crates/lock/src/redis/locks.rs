//! The locks of one Redis.
//!
//! The Redis keys of a lock named `stock` with the prefix `lock`. The braces are a hash tag, which keeps all of them on one cluster node.
//!
//! | key | content | written by | removed |
//! |---|---|---|---|
//! | `lock:{stock}` | the simple lock: a string, the lease id; the others: a hash of the owner, the fencing token and every lease id | the holder | on release or when the lease expires |
//! | `lock:{stock}:fence` | the last fencing token | every first acquire | [`Config::fencing_token_ttl`] after the last acquire |
//! | `lock:{stock}:readers` | a sorted set of the readers' lease ids by expiry | readers | with the last reader |
//! | `lock:{stock}:queue` | a sorted set of the lease ids of the fair lock's waiters by arrival | waiters | with the last waiter |
//! | `lock:{stock}:alive` | a sorted set of the same ids by the time at which their queue entries expire | waiters | with the last waiter |
//!
//! Waiters subscribe to the channel `lock:{stock}:freed`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use super::error::{Error, Result};
use super::lease::{LockKeys, ReleaseOutcome};
use super::lock::Lock;
use super::notifier::Notifier;
use super::owner::Owner;
use super::scripts::Kind;
use super::watchdog::Watchdog;
use stampede_redis::{Backoff, Client, CommandError, Servers, timeout_error};

/// Settings of a lock client. The [`Default`] suits most applications.
#[derive(Debug, Clone)]
pub struct Config {
    /// The prefix of every key.
    pub prefix: String,
    /// The TTL of locks that are acquired without [`Lock::with_ttl`]. The watchdog renews them every third of it for as long as the guard
    /// exists; if the process dies, the lock is free after this time at the latest.
    pub watchdog_ttl: Duration,
    /// How long connecting to Redis may take.
    pub connect_timeout: Duration,
    /// How long Redis may take to reply. After that the outcome of a command is unknown.
    pub response_timeout: Duration,
    /// How long the last fencing token of an unused lock is kept. If the clock of Redis goes back by more than this, tokens may repeat.
    pub fencing_token_ttl: Duration,
    /// How many replicas must confirm a lock before it counts as acquired or renewed (`WAIT`); 0 for none. A lock that was confirmed
    /// survives the loss of the master if a replica that confirmed it takes over, and a master that is cut off from its replicas
    /// neither grants nor renews locks. It costs a round trip to the replicas, and no lock can be acquired while a required replica is
    /// unavailable. See [`guarantees`](crate::guarantees).
    pub replicas: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prefix: "lock".to_owned(),
            watchdog_ttl: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_secs(1),
            fencing_token_ttl: Duration::from_secs(24 * 60 * 60),
            replicas: 0,
        }
    }
}

const MAX_FENCING_TOKEN_TTL: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);
/// How many background releases are retried at once. Further ones get one attempt each.
const MAX_RETRIED_RELEASES: usize = 16_384;
/// A request without a reply may be executed after a release that found nothing, so the release is repeated after this time.
const SECOND_RELEASE_DELAY: Duration = Duration::from_secs(1);
/// Background releases are retried for at least this time.
const MIN_RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long [`Locks::close`] waits.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A lock client for one Redis: all its locks share one connection, one subscription and one watchdog. Cheap to clone.
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
    pub(crate) client: Arc<Client>,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) watchdog: Arc<Watchdog>,
    pub(crate) config: Config,
    runtime: Handle,
    /// Permits for background releases that are retried.
    retried_releases: Arc<Semaphore>,
    /// How many background releases are in progress.
    pending_releases: watch::Sender<usize>,
    closed: AtomicBool,
    tasks: [AbortHandle; 2],
}

impl Locks {
    /// Connects; fails if Redis does not respond.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`], [`Error::InvalidArgument`].
    pub async fn connect(servers: impl Into<Servers>, config: Config) -> Result<Self> {
        let locks = Self::new(servers, config)?;
        locks.ping().await?;
        Ok(locks)
    }

    /// Creates a client that connects when it is first used.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn new(servers: impl Into<Servers>, config: Config) -> Result<Self> {
        check_ttl(config.watchdog_ttl)?;
        if !(Duration::from_millis(1)..=MAX_FENCING_TOKEN_TTL).contains(&config.fencing_token_ttl) {
            return Err(Error::invalid("the TTL of fencing tokens must be between a millisecond and ten years"));
        }
        let runtime = Handle::current();
        let client = Client::new(servers.into(), config.connect_timeout, config.response_timeout)
            .map_err(|error| Error::invalid(format!("invalid server address: {error}")))?;
        let client = Arc::new(client);
        let (notifier, watchdog) = (Arc::new(Notifier::new(&config)), Arc::new(Watchdog::new(&config)));
        let notifying = runtime.spawn(notifier.clone().run(client.clone())).abort_handle();
        let renewing = runtime.spawn(watchdog.clone().run(client.clone())).abort_handle();
        let shared = Shared {
            client,
            notifier,
            watchdog,
            config,
            runtime,
            retried_releases: Arc::new(Semaphore::new(MAX_RETRIED_RELEASES)),
            pending_releases: watch::Sender::new(0),
            closed: AtomicBool::new(false),
            tasks: [notifying, renewing],
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Checks that Redis responds.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::Refused`].
    pub async fn ping(&self) -> Result<()> {
        self.shared.client.send(redis::cmd("PING")).await?;
        Ok(())
    }

    /// Waits until the locks of dropped guards are released, for at most ten seconds. Call it at the end of a program: if the runtime
    /// shuts down before, these locks stay until their leases expire. Callers that wait for a lock, or ask for one from now on, get
    /// [`Error::Closed`]; existing guards stay valid.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks};
    /// let locks = Locks::connect(url, Config::default()).await?;
    /// let guard = locks.simple("report")?.lock().await?;
    /// drop(guard);
    /// locks.close().await?; // the next process need not wait for the lease to expire
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unreachable`] if some are not released by then; their leases expire.
    pub async fn close(&self) -> Result<()> {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.notifier.wake_all();
        let mut pending = self.shared.pending_releases.subscribe();
        let released = tokio::time::timeout(CLOSE_TIMEOUT, pending.wait_for(|&count| count == 0)).await;
        released.map(drop).map_err(|_| Error::Unreachable(timeout_error()))
    }

    /// The simplest lock: one command to acquire it, one to release it. Not re-entrant, no fencing token.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the name is empty or begins with a closing brace; this also applies to the other kinds.
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
    /// let (alice, bob) = (Owner::new(), Owner::new());
    /// let outer = locks.reentrant("account", &alice)?.lock().await?;
    /// let inner = locks.reentrant("account", &alice)?.lock().await?;
    /// assert_eq!(outer.fencing_token(), inner.fencing_token());
    /// outer.release().await?;
    /// assert!(locks.reentrant("account", &bob)?.try_lock().await.is_err(), "still held");
    /// inner.release().await?;
    /// assert!(locks.reentrant("account", &bob)?.try_lock().await.is_ok());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`simple`](Self::simple).
    pub fn reentrant(&self, name: &str, owner: &Owner) -> Result<Lock> {
        self.lock(Kind::Reentrant, name, owner.clone())
    }

    /// A re-entrant lock that is granted in order of arrival, across processes. A waiter whose process has died is skipped when its
    /// queue entry has not been renewed for [`Config::watchdog_ttl`].
    ///
    /// # Errors
    /// As [`simple`](Self::simple).
    pub fn fair(&self, name: &str, owner: &Owner) -> Result<Lock> {
        self.lock(Kind::Fair, name, owner.clone())
    }

    /// A lock for many readers or one writer.
    ///
    /// ```
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = stampede_testkit::redis::start()?;
    /// # let url = stampede_testkit::redis::url(server.port());
    /// # use stampede_lock::{Config, Locks, Owner};
    /// # let locks = Locks::connect(url, Config::default()).await?;
    /// let (alice, bob) = (locks.read_write("page", &Owner::new())?, locks.read_write("page", &Owner::new())?);
    /// let write_guard = alice.write().lock().await?;
    /// assert!(bob.read().try_lock().await.is_err());
    /// let read_guard = alice.downgrade(write_guard).await?;
    /// let another = bob.read().lock().await?;
    /// # read_guard.release().await?;
    /// # another.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`simple`](Self::simple).
    pub fn read_write(&self, name: &str, owner: &Owner) -> Result<ReadWriteLock> {
        let read = self.lock(Kind::Read, name, owner.clone())?;
        Ok(ReadWriteLock { read, write: self.lock(Kind::Write, name, owner.clone())? })
    }

    /// The number of leases and queue entries that the watchdog renews.
    pub fn watched_count(&self) -> usize {
        self.shared.watchdog.watched_count()
    }

    fn lock(&self, kind: Kind, name: &str, owner: Owner) -> Result<Lock> {
        // A cluster places a key by the part in braces. If that part were empty, the keys of one lock could be on different nodes.
        if name.is_empty() || name.starts_with('}') {
            return Err(Error::invalid("the name of a lock must not be empty or begin with a closing brace"));
        }
        let main = format!("{}:{{{name}}}", self.shared.config.prefix);
        let channel = format!("{main}:freed").into();
        let others = kind.key_suffixes().iter().map(|suffix| format!("{main}:{suffix}"));
        let keys = std::iter::once(main.clone()).chain(others).collect();
        Ok(Lock::new(self.shared.clone(), LockKeys { kind, keys, channel }, owner))
    }
}

/// A lock for many readers or one writer, re-entrant for its owner. The holder of the write lock may also acquire the read lock; the holder
/// of the read lock must release it before acquiring the write lock.
///
/// A steady stream of readers can keep a writer waiting.
#[derive(Debug, Clone)]
pub struct ReadWriteLock {
    read: Lock,
    write: Lock,
}

impl ReadWriteLock {
    /// The read lock.
    pub fn read(&self) -> &Lock {
        &self.read
    }

    /// The write lock.
    pub fn write(&self) -> &Lock {
        &self.write
    }

    /// Turns the write lock into a read lock, without letting another writer in between.
    ///
    /// # Errors
    /// As [`Lock::try_lock`] and [`Guard::release`](crate::Guard::release). The write lock is released in any case.
    pub async fn downgrade(&self, write_guard: crate::Guard) -> Result<crate::Guard> {
        let read_guard = self.read.try_lock().await?;
        write_guard.release().await?;
        Ok(read_guard)
    }
}

impl Shared {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Runs a release in the background; [`Locks::close`] waits for it.
    pub(crate) fn spawn_release<T: Send + 'static>(
        &self,
        release: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let pending = PendingRelease::new(&self.pending_releases);
        self.runtime.spawn(async move {
            let outcome = release.await;
            drop(pending);
            outcome
        })
    }

    /// Releases a lease id that Redis may have. `unresolved`: a request without a reply may be executed late.
    pub(crate) fn release_in_background(
        self: Arc<Self>,
        lock: Arc<LockKeys>,
        id: Arc<str>,
        ttl: Duration,
        unresolved: bool,
    ) {
        let permit = self.retried_releases.clone().try_acquire_owned().ok();
        // On a runtime that is shutting down this does nothing, and the lease expires.
        let shared = self.clone();
        self.spawn_release(async move {
            let now = Instant::now();
            let deadline = if permit.is_some() { now + ttl.max(MIN_RELEASE_TIMEOUT) } else { now };
            shared.release_until(&lock, &id, deadline, unresolved).await;
            drop(permit);
        });
    }

    async fn release_until(&self, lock: &LockKeys, id: &str, deadline: Instant, unresolved: bool) {
        let mut backoff = new_backoff();
        let mut repeated = false;
        loop {
            match lock.release(&self.client, id).await {
                Ok(ReleaseOutcome::Released) if !unresolved => return,
                Ok(_) if repeated || Instant::now() >= deadline => return,
                Ok(_) => {
                    repeated = true;
                    tokio::time::sleep(SECOND_RELEASE_DELAY).await;
                }
                Err(CommandError::Refused(error)) => {
                    tracing::warn!(%error, "failed to release a lock; its lease will expire");
                    return;
                }
                Err(error) if Instant::now() >= deadline => {
                    tracing::warn!(%error, "failed to release a lock; its lease will expire");
                    return;
                }
                Err(_) => backoff.sleep().await,
            }
        }
    }
}

/// The delay between retries while Redis cannot be reached.
pub(crate) fn new_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(10), Duration::from_secs(1))
}

/// Counts a pending release, also if its task is aborted.
struct PendingRelease(watch::Sender<usize>);

impl PendingRelease {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for PendingRelease {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

pub(crate) fn check_ttl(ttl: Duration) -> Result<()> {
    if (Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60)).contains(&ttl) {
        return Ok(());
    }
    Err(Error::invalid("the TTL of a lock must be between 10 milliseconds and a day"))
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
