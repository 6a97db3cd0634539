//! Redis behind the caches of a process: one connection, one subscription, one set of locks for all of them.
//!
//! | key | holds | written by | goes |
//! |---|---|---|---|
//! | `cache:{shop:7}` | the value of key 7 of the cache `shop`: until when it is fresh, and JSON or nothing | who loaded it | with its expiry, or when it is declared gone |
//! | `cache:{shop:7}:version` | a number thrown when it was last declared gone | who changed it | an hour later |
//! | `lock:{cache:shop:7}` | the lock of who loads it | who loads it | with the load |
//!
//! The channel `cache:gone` tells all processes what was declared gone: the cache's name and the key.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use rand::RngExt as _;
use redis::{FromRedisValue as _, RedisResult, Value};
use stampede_lock::{Lock, Locks};
use stampede_redis::{Failure, Link, Script, Servers, too_late};
use tokio::task::AbortHandle;

static STORE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/store.lua")));
static PUT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/put.lua")));
static FORGET: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/forget.lua")));

const CHANNEL: &str = "cache:gone";
/// Longer than any load takes.
const VERSION_KEPT: Duration = Duration::from_secs(3600);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The subscription is asked for a sign of life this often.
const PING_EVERY: Duration = Duration::from_secs(3);

/// How Redis is used. [`Default`] is right for most.
#[derive(Debug, Clone, Copy)]
pub struct RemoteConfig {
    /// How long connecting may take.
    pub connect_within: Duration,
    /// How long an answer may take. Afterwards Redis counts as away, and the source is asked.
    pub answer_within: Duration,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self { connect_within: Duration::from_millis(500), answer_within: Duration::from_millis(300) }
    }
}

/// Redis behind the caches of a process. Cheap to clone; give it to every [`Builder`](crate::Builder).
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
/// use stampede_lock::{Config, Locks};
///
/// let remote = || -> Result<Remote, Box<dyn std::error::Error>> {
///     let locks = Locks::new(url.as_str(), Config::default())?;
///     Ok(Remote::new(url.as_str(), locks, RemoteConfig::default())?)
/// };
/// // Two processes would do the same.
/// let here: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(remote()?).build();
/// let there: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(remote()?).build();
/// here.put(&7, Some("Seven".to_owned())).await;
/// let shop = there.get_or_load(&7, || async { panic!("Redis has it") }).await?;
/// assert_eq!(*shop.unwrap(), "Seven");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Link>,
    locks: Locks,
    breaker: Breaker,
    caches: Arc<Caches>,
    config: RemoteConfig,
    listening: AbortHandle,
}

/// Those who hear what is gone, by their names.
#[derive(Default)]
struct Caches(Mutex<HashMap<String, Vec<Weak<dyn Told>>>>);

/// A cache that hears what is gone.
pub(crate) trait Told: Send + Sync {
    /// This key, on some process.
    fn gone(&self, key: &str);
    /// Perhaps any key: messages may have been missed.
    fn doubtful(&self);
}

/// What Redis knows of a key.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) value: Option<Vec<u8>>,
    /// Empty if it was never declared gone, or long ago.
    pub(crate) version: Vec<u8>,
}

impl Remote {
    /// Nothing is connected yet: without Redis the caches work, too. `locks` is for the loads, one process at a time.
    ///
    /// # Errors
    /// If the addresses cannot be used.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn new(servers: impl Into<Servers>, locks: Locks, config: RemoteConfig) -> RedisResult<Self> {
        let link = Arc::new(Link::new(servers.into(), config.connect_within, config.answer_within)?);
        let (breaker, caches) = (Breaker::default(), Arc::new(Caches::default()));
        let listening = listen(link.clone(), caches.clone(), config.answer_within);
        let listening = tokio::spawn(listening).abort_handle();
        Ok(Self { shared: Arc::new(Shared { link, locks, breaker, caches, config, listening }) })
    }

    pub(crate) fn register(&self, name: &str, cache: Weak<dyn Told>) {
        self.shared.caches.lock().entry(name.to_owned()).or_default().push(cache);
    }

    pub(crate) fn link(&self) -> &Link {
        &self.shared.link
    }

    pub(crate) fn config(&self) -> &RemoteConfig {
        &self.shared.config
    }

    pub(crate) fn locks(&self) -> &Locks {
        &self.shared.locks
    }

    /// The lock under which a key is loaded.
    pub(crate) fn lock(&self, cache: &str, key: &str) -> Option<Lock> {
        self.shared.locks.simple(&format!("cache:{cache}:{key}")).ok()
    }

    /// `None` if Redis is away.
    pub(crate) async fn find(&self, cache: &str, key: &str) -> Option<Found> {
        let [value, version] = keys(cache, key);
        let mut command = redis::cmd("MGET");
        command.arg(value).arg(version);
        let found = self.guarded(self.shared.link.send(command)).await?;
        let (value, version) = <(Option<Vec<u8>>, Option<Vec<u8>>)>::from_redis_value(found).ok()?;
        Some(Found { value, version: version.unwrap_or_default() })
    }

    /// Stores a value that was loaded after this version was read. `false` if it is old by now; `true` also if nobody knows.
    pub(crate) async fn store(&self, cache: &str, key: &str, version: &[u8], value: &[u8], kept_for: Duration) -> bool {
        let kept_ms = kept_for.as_millis().max(1).to_string();
        let args = [version, value, kept_ms.as_bytes()];
        self.guarded(self.shared.link.run(&STORE, &keys(cache, key), &args)).await != Some(Value::Int(0))
    }

    /// Puts a value in the place of whatever is there or is being loaded. `false` if Redis did not say that it did.
    pub(crate) async fn put(&self, cache: &str, key: &str, value: &[u8], kept_for: Duration) -> bool {
        let (version, version_ms) = new_version();
        let kept_ms = kept_for.as_millis().max(1).to_string();
        let message = message(cache, key);
        let args: [&[u8]; 6] = [
            version.as_bytes(),
            version_ms.as_bytes(),
            CHANNEL.as_bytes(),
            message.as_bytes(),
            value,
            kept_ms.as_bytes(),
        ];
        self.shared.link.run(&PUT, &keys(cache, key), &args).await.is_ok()
    }

    /// Declares a key gone. `false` if Redis did not say that it did.
    pub(crate) async fn forget(&self, cache: &str, key: &str) -> bool {
        let (version, version_ms) = new_version();
        let message = message(cache, key);
        let args = [&*version, &*version_ms, CHANNEL, &*message];
        // Not behind the breaker: this has to be done.
        self.shared.link.run(&FORGET, &keys(cache, key), &args).await.is_ok()
    }

    /// `None` if Redis does not answer, or has not a moment ago.
    pub(crate) async fn guarded(&self, call: impl Future<Output = Result<Value, Failure>>) -> Option<Value> {
        if !self.shared.breaker.may_pass() {
            return None;
        }
        match call.await {
            Ok(value) => {
                self.shared.breaker.worked();
                Some(value)
            }
            // It answers, though not with what we wanted (no memory, no permission): others may fare better.
            Err(Failure::Refused(error)) => {
                tracing::debug!(%error, "Redis refuses");
                self.shared.breaker.worked();
                None
            }
            Err(failure) => {
                tracing::debug!(?failure, "Redis does not answer; the source is asked");
                self.shared.breaker.failed();
                None
            }
        }
    }
}

/// A new version, and how long it is kept, in milliseconds.
fn new_version() -> (String, String) {
    (format!("{:016x}", rand::rng().random::<u64>()), VERSION_KEPT.as_millis().to_string())
}

fn message(cache: &str, key: &str) -> String {
    format!("{cache}\0{key}")
}

fn keys(cache: &str, key: &str) -> [String; 2] {
    let value = format!("cache:{{{cache}:{key}}}");
    let version = format!("{value}:version");
    [value, version]
}

/// Leaves Redis alone for a while after it has not answered; then lets one try through.
#[derive(Debug, Default)]
struct Breaker {
    /// Milliseconds after `START`; 0 if all is well.
    closed_until: AtomicU64,
    pause_ms: AtomicU64,
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

fn since_start() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

impl Breaker {
    fn may_pass(&self) -> bool {
        let until = self.closed_until.load(Ordering::Acquire);
        if until == 0 {
            return true;
        }
        let now = since_start();
        // One is let through; the others wait for what it finds.
        now >= until && {
            let next = now + self.pause_ms.load(Ordering::Relaxed).max(1);
            self.closed_until.compare_exchange(until, next, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        }
    }

    fn worked(&self) {
        if self.closed_until.swap(0, Ordering::AcqRel) != 0 {
            self.pause_ms.store(0, Ordering::Relaxed);
        }
    }

    fn failed(&self) {
        let longest = u64::try_from(LONGEST_PAUSE.as_millis()).unwrap_or(u64::MAX);
        let first = u64::try_from(FIRST_PAUSE.as_millis()).unwrap_or(1);
        let pause = (2 * self.pause_ms.load(Ordering::Relaxed)).clamp(first, longest);
        // Many fail at once with one outage: it counts once.
        let now = since_start();
        if now >= self.closed_until.load(Ordering::Acquire) {
            self.pause_ms.store(pause, Ordering::Relaxed);
            self.closed_until.store(now + pause, Ordering::Release);
        }
    }
}

async fn listen(link: Arc<Link>, caches: Arc<Caches>, answer_within: Duration) {
    let mut pause = FIRST_PAUSE;
    loop {
        if let Err(error) = serve(&link, &caches, answer_within, &mut pause).await {
            tracing::debug!(%error, "no subscription; trying again");
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn serve(link: &Link, caches: &Caches, answer_within: Duration, pause: &mut Duration) -> RedisResult<()> {
    let (mut sink, mut messages) = link.listen().await?.split();
    in_time(answer_within, sink.subscribe(CHANNEL)).await?;
    *pause = FIRST_PAUSE;
    // Whatever was said before we listened was missed.
    caches.tell(|cache| cache.doubtful());
    let mut ping = tokio::time::interval_at(tokio::time::Instant::now() + PING_EVERY, PING_EVERY);
    loop {
        tokio::select! {
            message = messages.next() => {
                let Some(message) = message else { return Ok(()) };
                let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or_default();
                if let Some((cache, key)) = text.split_once('\0') {
                    let known = caches.lock().get(cache).cloned().unwrap_or_default();
                    known.iter().filter_map(Weak::upgrade).for_each(|cache| cache.gone(key));
                }
            }
            _ = ping.tick() => in_time(answer_within, sink.ping::<Value>()).await.map(drop)?,
        }
    }
}

async fn in_time<T>(within: Duration, work: impl Future<Output = RedisResult<T>>) -> RedisResult<T> {
    tokio::time::timeout(within, work).await.unwrap_or_else(|_| Err(too_late()))
}

impl Caches {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Weak<dyn Told>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who are still there; forgets the others.
    fn tell(&self, what: impl Fn(&dyn Told)) {
        self.lock().retain(|_, caches| {
            caches.retain(|cache| cache.upgrade().inspect(|cache| what(&**cache)).is_some());
            !caches.is_empty()
        });
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}
