//! Redis behind the caches of a process: one connection, one subscription, one set of locks for all of them.
//!
//! Everything in Redis begins with the name of the application, here `app`, so that two applications can use one Redis.
//!
//! | key | holds | written by | goes |
//! |---|---|---|---|
//! | `app:cache:{shop:7}` | the value of key 7 of the cache `shop`: until when it is fresh, and JSON or nothing | who loaded it | with its expiry, or when it is declared gone |
//! | `app:cache:{shop:7}:version` | a random number, new each time the key is declared gone or put | who changed it | an hour later |
//! | `app:cache:{shop:7}:waiting` | that a process waits for the load of another | who waits | with the end of the load, or ten seconds later |
//! | `app:lock:{cache:shop:7}` | the lock of who loads it | who loads it | with the load, or [`RemoteConfig::loader_lease`] after the death of its process |
//!
//! Two channels, both with the cache's name and the key as the message: `app:cache:gone` says to all processes what was declared gone,
//! `app:cache:loaded` that a load has ended that some process waits for.

use std::fmt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use rand::RngExt as _;
use redis::{ErrorKind, FromRedisValue as _, RedisResult, Value};
use stampede_lock::{Config, Lock, Locks};
use stampede_redis::{Client, CommandError, Script, Servers};
use tokio::task::AbortHandle;

use crate::breaker::Breaker;
use crate::builder::is_name;
use crate::listener::{Caches, Told, listen, message};

static FIND_OR_WAIT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/find_or_wait.lua")));
static STORE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/store.lua")));
static LOAD_ENDED: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/load_ended.lua")));
static PUT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/put.lua")));
static FORGET: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/forget.lua")));

/// Longer than any load or change takes.
pub(crate) const VERSION_KEPT: Duration = Duration::from_secs(3600);
/// Who still waits says so again long before.
const WAITING_KEPT: Duration = Duration::from_secs(10);
const LONGEST_ANSWER: Duration = Duration::from_secs(3600);
const LEASES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(3600)];

/// How Redis is used. [`Default`] is right for most.
#[derive(Debug, Clone, Copy)]
pub struct RemoteConfig {
    /// How long connecting may take.
    pub connect_within: Duration,
    /// How long an answer may take. Afterwards Redis counts as away, and the source is asked.
    pub answer_within: Duration,
    /// The lease of the lock under which a key is loaded, renewed every third of it for as long as the load takes. If the process that
    /// loads dies, another one takes over after this time at the latest. Between 100 milliseconds and an hour.
    pub loader_lease: Duration,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            connect_within: Duration::from_millis(500),
            answer_within: Duration::from_millis(300),
            loader_lease: Duration::from_secs(3),
        }
    }
}

/// Redis behind the caches of a process. Cheap to clone; give it to every [`Builder`](crate::Builder).
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
///
/// // Two processes would do the same.
/// let here = Remote::new("app", url.as_str(), RemoteConfig::default())?;
/// let here: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(here).build();
/// let there = Remote::new("app", url.as_str(), RemoteConfig::default())?;
/// let there: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(there).build();
///
/// here.put(&7, async { Ok::<_, std::io::Error>(Some("Seven".to_owned())) }).await?;
/// let shop = there.get_or_load(&7, || async { panic!("Redis has it") }).await?;
/// assert_eq!(*shop.unwrap(), "Seven");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    link: Arc<Client>,
    locks: Locks,
    breaker: Breaker,
    caches: Arc<Caches>,
    keys: Arc<Keys>,
    config: RemoteConfig,
    listening: AbortHandle,
}

/// The names of everything in Redis.
pub(crate) struct Keys {
    application: String,
    pub(crate) gone: String,
    pub(crate) loaded: String,
}

impl Keys {
    fn new(application: String) -> Self {
        let channel = |name| format!("{application}:cache:{name}");
        Self { gone: channel("gone"), loaded: channel("loaded"), application }
    }

    /// The value of a key, its version, and whether a process waits for it. The braces keep them on one node of a cluster.
    fn of(&self, cache: &str, key: &str) -> [String; 3] {
        let value = format!("{}:cache:{{{cache}:{key}}}", self.application);
        let (version, waiting) = (format!("{value}:version"), format!("{value}:waiting"));
        [value, version, waiting]
    }
}

/// What Redis knows of a key.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) value: Option<Vec<u8>>,
    /// Empty if it was never declared gone, or long ago.
    pub(crate) version: Vec<u8>,
}

impl Found {
    fn read(found: Value) -> Option<Self> {
        let (value, version) = <(Option<Vec<u8>>, Option<Vec<u8>>)>::from_redis_value(found).ok()?;
        Some(Self { value, version: version.unwrap_or_default() })
    }
}

impl Remote {
    /// Nothing is connected yet: without Redis the caches work, too.
    ///
    /// `application` is the first part of every key and channel: processes that share values have the same, and applications that share
    /// nothing but the Redis have different ones.
    ///
    /// # Errors
    /// If the addresses cannot be used; if the name of the application is empty or has one of `:{}` or a control character in it.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn new(
        application: impl Into<String>,
        servers: impl Into<Servers>,
        mut config: RemoteConfig,
    ) -> RedisResult<Self> {
        let (application, servers) = (application.into(), servers.into());
        if !is_name(&application) {
            return Err((ErrorKind::InvalidClientConfig, "not a name for an application", application).into());
        }
        let RemoteConfig { connect_within, answer_within, loader_lease } = &mut config;
        *connect_within = (*connect_within).min(LONGEST_ANSWER);
        *answer_within = (*answer_within).min(LONGEST_ANSWER);
        *loader_lease = (*loader_lease).clamp(LEASES[0], LEASES[1]);
        let link = Arc::new(Client::new(servers.clone(), *connect_within, *answer_within)?);
        let settings = Config {
            prefix: format!("{application}:lock"),
            watchdog_lease: *loader_lease,
            connect_within: *connect_within,
            answer_within: *answer_within,
            ..Config::default()
        };
        let locks = Locks::new(servers, settings).map_err(|error| {
            redis::RedisError::from((ErrorKind::InvalidClientConfig, "the locks cannot be made", error.to_string()))
        })?;
        let (keys, caches) = (Arc::new(Keys::new(application)), Arc::new(Caches::default()));
        let listening = listen(link.clone(), keys.clone(), caches.clone(), config.answer_within);
        let listening = tokio::spawn(listening).abort_handle();
        let shared = Shared { link, locks, breaker: Breaker::default(), caches, keys, config, listening };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn register(&self, name: &str, cache: Weak<dyn Told>) {
        self.shared.caches.register(name, cache);
    }

    pub(crate) fn application(&self) -> &str {
        &self.shared.keys.application
    }

    pub(crate) fn link(&self) -> &Client {
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
        let [value, version, _] = self.shared.keys.of(cache, key);
        let mut command = redis::cmd("MGET");
        command.arg(value).arg(version);
        self.guarded(self.shared.link.send(command)).await.and_then(Found::read)
    }

    /// The same; and if there is no value, a message is asked for when its load has ended.
    pub(crate) async fn find_or_wait(&self, cache: &str, key: &str) -> Option<Found> {
        let (keys, args) = (self.shared.keys.of(cache, key), [milliseconds(WAITING_KEPT)]);
        self.guarded(self.shared.link.eval(&FIND_OR_WAIT, &keys, &args)).await.and_then(Found::read)
    }

    /// A message is asked for when the load of a key has ended.
    pub(crate) async fn wait(&self, cache: &str, key: &str) {
        let [.., waiting] = self.shared.keys.of(cache, key);
        let mut command = redis::cmd("SET");
        command.arg(waiting).arg("1").arg("PX").arg(milliseconds(WAITING_KEPT));
        self.guarded(self.shared.link.send(command)).await;
    }

    /// Stores a value that was loaded after this version was read. `false` if it is old by now; `true` also if nobody knows.
    pub(crate) async fn store(&self, cache: &str, key: &str, version: &[u8], value: &[u8], kept_for: Duration) -> bool {
        let Shared { link, keys, .. } = &*self.shared;
        let (kept_ms, message) = (milliseconds(kept_for), message(cache, key));
        let args = [version, value, kept_ms.as_bytes(), keys.loaded.as_bytes(), message.as_bytes()];
        self.guarded(link.eval(&STORE, &keys.of(cache, key), &args)).await != Some(Value::Int(0))
    }

    /// A load has ended without a value in Redis, and its lock is free. Processes that wait are woken; if that fails, they look by
    /// themselves a little later.
    pub(crate) async fn load_ended(&self, cache: &str, key: &str) {
        let [.., waiting] = self.shared.keys.of(cache, key);
        let args = [&self.shared.keys.loaded, &message(cache, key)];
        self.guarded(self.shared.link.eval(&LOAD_ENDED, &[waiting], &args)).await;
    }

    /// The version of a key. `None` if Redis is away.
    pub(crate) async fn version(&self, cache: &str, key: &str) -> Option<Vec<u8>> {
        let [_, version, _] = self.shared.keys.of(cache, key);
        let found = self.guarded(self.shared.link.send(redis::cmd("GET").arg(version).to_owned())).await?;
        Option::<Vec<u8>>::from_redis_value(found).ok().map(Option::unwrap_or_default)
    }

    /// Puts a value in the place of whatever is there or is being loaded, if its version is still this one; otherwise declares the key
    /// gone. `None` if Redis did not say that it did either.
    pub(crate) async fn put(
        &self,
        cache: &str,
        key: &str,
        before: &[u8],
        value: &[u8],
        kept_for: Duration,
    ) -> Option<bool> {
        let (version, version_ms) = (new_version(), milliseconds(VERSION_KEPT));
        let (kept_ms, message) = (milliseconds(kept_for), message(cache, key));
        let args: [&[u8]; 7] = [
            version.as_bytes(),
            version_ms.as_bytes(),
            self.shared.keys.gone.as_bytes(),
            message.as_bytes(),
            before,
            value,
            kept_ms.as_bytes(),
        ];
        let put = self.shared.link.eval(&PUT, &self.shared.keys.of(cache, key)[..2], &args).await.ok()?;
        Some(put == Value::Int(1))
    }

    /// Declares a key gone. `false` if Redis did not say that it did.
    pub(crate) async fn forget(&self, cache: &str, key: &str) -> bool {
        let (version, version_ms) = (new_version(), milliseconds(VERSION_KEPT));
        let args = [&version, &version_ms, &self.shared.keys.gone, &message(cache, key)];
        // Not behind the breaker: this has to be done.
        self.shared.link.eval(&FORGET, &self.shared.keys.of(cache, key)[..2], &args).await.is_ok()
    }

    /// `None` if Redis does not answer, or has not a moment ago.
    pub(crate) async fn guarded(&self, call: impl Future<Output = Result<Value, CommandError>>) -> Option<Value> {
        if !self.shared.breaker.may_pass() {
            return None;
        }
        match call.await {
            Ok(value) => {
                self.shared.breaker.worked();
                Some(value)
            }
            // It answers, though not with what we wanted (no memory, no permission): others may fare better.
            Err(CommandError::Refused(error)) => {
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

fn new_version() -> String {
    format!("{:016x}", rand::rng().random::<u64>())
}

fn milliseconds(time: Duration) -> String {
    time.as_millis().max(1).to_string()
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
