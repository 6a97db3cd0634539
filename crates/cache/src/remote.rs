//! The Redis level that the caches of a process share: one connection, one subscription and one set of locks.
//!
//! All keys and channels begin with the name of the application, here `app`, so that several applications can use one Redis.
//!
//! | key | contents | written by | removed |
//! |---|---|---|---|
//! | `app:cache:{shop:7}` | the value of key 7 of the cache `shop`, see `entry` | the process that loaded it | when it expires or is invalidated |
//! | `app:cache:{shop:7}:version` | a random number, replaced whenever the key is invalidated or put | the process that changed it | after an hour |
//! | `app:cache:{shop:7}:waiting` | marks that a process waits for a load by another | the waiting process | when the load ends, or after ten seconds |
//! | `app:lock:{cache:shop:7}` | the lock of the process that loads the key | the loading process | when the load ends, or [`RemoteConfig::load_lock_ttl`] after the process has died |
//!
//! There are two channels; the message is the cache's name and the key. `app:cache:invalidated` announces invalidations,
//! `app:cache:load_ended` the end of a load that another process waits for.

use std::fmt;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use rand::RngExt as _;
use redis::{ErrorKind, FromRedisValue as _, RedisResult, Value};
use stampede_lock::{Config, Lock, Locks};
use stampede_redis::{Client, CommandError, Script, Servers};
use tokio::task::AbortHandle;

use crate::breaker::Breaker;
use crate::builder::is_valid_name;
use crate::listener::{InvalidationListener, Listeners, message, run_subscription};

static GET_OR_WAIT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/get_or_wait.lua")));
static STORE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/store.lua")));
static LOAD_ENDED: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/load_ended.lua")));
static PUT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/put.lua")));
static INVALIDATE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/invalidate.lua")));

/// Longer than any load or change takes.
pub(crate) const VERSION_TTL: Duration = Duration::from_secs(3600);
/// Longer than the interval in which a waiting process registers again.
const WAITER_TTL: Duration = Duration::from_secs(10);
const MAX_TIMEOUT: Duration = Duration::from_secs(3600);
const MIN_LOCK_TTL: Duration = Duration::from_millis(100);
const MAX_LOCK_TTL: Duration = Duration::from_secs(3600);

/// How Redis is used.
#[derive(Debug, Clone, Copy)]
pub struct RemoteConfig {
    /// How long connecting may take. Default: 500 ms.
    pub connect_timeout: Duration,
    /// How long a response may take. After that Redis counts as unavailable, and the source is called. Default: 300 ms.
    pub response_timeout: Duration,
    /// The TTL of the lock under which a key is loaded, from 100 ms to an hour. It is renewed every third of this time while the load
    /// runs. If the loading process dies, another one takes over after this time at the latest. Default: 3 seconds.
    pub load_lock_ttl: Duration,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_millis(500),
            response_timeout: Duration::from_millis(300),
            load_lock_ttl: Duration::from_secs(3),
        }
    }
}

/// The Redis level of the caches of a process. Cheap to clone; pass a clone to every [`Builder`](crate::Builder).
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = stampede_testkit::redis::start()?;
/// # let url = stampede_testkit::redis::url(server.port());
/// use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
///
/// // Two processes would use the same code.
/// let here = Remote::new("app", url.as_str(), RemoteConfig::default())?;
/// let here: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(here).build();
/// let there = Remote::new("app", url.as_str(), RemoteConfig::default())?;
/// let there: Cache<u64, String, std::io::Error> = Builder::new("shop").remote(there).build();
///
/// here.put(&7, async { Ok::<_, std::io::Error>(Some("Seven".to_owned())) }).await?;
/// let shop = there.get_or_load(&7, || async { panic!("not called: Redis has the value") }).await?;
/// assert_eq!(*shop.unwrap(), "Seven");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

struct Shared {
    client: Arc<Client>,
    locks: Locks,
    breaker: Breaker,
    listeners: Arc<Listeners>,
    keys: Arc<Keys>,
    config: RemoteConfig,
    subscription: AbortHandle,
}

/// The names of keys and channels in Redis.
pub(crate) struct Keys {
    application: String,
    pub(crate) invalidated: String,
    pub(crate) load_ended: String,
}

impl Keys {
    fn new(application: String) -> Self {
        let channel = |name| format!("{application}:cache:{name}");
        Self { invalidated: channel("invalidated"), load_ended: channel("load_ended"), application }
    }

    /// The Redis keys of a value, of its version and of the mark of a waiting process. The braces place them on one node of a cluster.
    fn for_key(&self, cache: &str, key: &str) -> [String; 3] {
        let value = format!("{}:cache:{{{cache}:{key}}}", self.application);
        let (version, waiting) = (format!("{value}:version"), format!("{value}:waiting"));
        [value, version, waiting]
    }
}

/// A value and its version as read from Redis.
#[derive(Debug)]
pub(crate) struct RemoteEntry {
    pub(crate) value: Option<Vec<u8>>,
    /// Empty if the key was not changed within [`VERSION_TTL`].
    pub(crate) version: Vec<u8>,
}

impl RemoteEntry {
    fn read(reply: Value) -> Option<Self> {
        let (value, version) = <(Option<Vec<u8>>, Option<Vec<u8>>)>::from_redis_value(reply).ok()?;
        Some(Self { value, version: version.unwrap_or_default() })
    }
}

impl Remote {
    /// Does not connect yet, and does not fail if Redis is unavailable: the caches then work without it.
    ///
    /// `application` is the first part of every key and channel, and may contain colons. Processes that share values use the same name; applications that only
    /// share the Redis server use different ones.
    ///
    /// # Errors
    /// If the addresses are invalid; if the name of the application is empty or contains `{`, `}` or a control character.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn new(
        application: impl Into<String>,
        servers: impl Into<Servers>,
        mut config: RemoteConfig,
    ) -> RedisResult<Self> {
        let (application, servers) = (application.into(), servers.into());
        if !application.split(':').all(is_valid_name) {
            return Err((ErrorKind::InvalidClientConfig, "invalid name of an application", application).into());
        }
        let RemoteConfig { connect_timeout, response_timeout, load_lock_ttl } = &mut config;
        *connect_timeout = (*connect_timeout).min(MAX_TIMEOUT);
        *response_timeout = (*response_timeout).min(MAX_TIMEOUT);
        *load_lock_ttl = (*load_lock_ttl).clamp(MIN_LOCK_TTL, MAX_LOCK_TTL);
        let client = Arc::new(Client::new(servers.clone(), *connect_timeout, *response_timeout)?);
        let settings = Config {
            prefix: format!("{application}:lock"),
            watchdog_ttl: *load_lock_ttl,
            connect_timeout: *connect_timeout,
            response_timeout: *response_timeout,
            ..Config::default()
        };
        let locks = Locks::new(servers, settings).map_err(|error| {
            redis::RedisError::from((ErrorKind::InvalidClientConfig, "the locks cannot be created", error.to_string()))
        })?;
        let (keys, listeners) = (Arc::new(Keys::new(application)), Arc::new(Listeners::default()));
        let subscription = run_subscription(client.clone(), keys.clone(), listeners.clone(), config.response_timeout);
        let subscription = tokio::spawn(subscription).abort_handle();
        let shared = Shared { client, locks, breaker: Breaker::default(), listeners, keys, config, subscription };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn register(&self, name: &str, listener: Weak<dyn InvalidationListener>) {
        self.shared.listeners.register(name, listener);
    }

    pub(crate) fn application(&self) -> &str {
        &self.shared.keys.application
    }

    pub(crate) fn client(&self) -> &Client {
        &self.shared.client
    }

    pub(crate) fn config(&self) -> &RemoteConfig {
        &self.shared.config
    }

    pub(crate) fn locks(&self) -> &Locks {
        &self.shared.locks
    }

    /// The lock of the load of a key.
    pub(crate) fn lock(&self, cache: &str, key: &str) -> Option<Lock> {
        self.shared.locks.simple(&format!("cache:{cache}:{key}")).ok()
    }

    /// Reads a value and its version. `None` if Redis is unavailable.
    pub(crate) async fn get(&self, cache: &str, key: &str) -> Option<RemoteEntry> {
        let [value, version, _] = self.shared.keys.for_key(cache, key);
        let mut command = redis::cmd("MGET");
        command.arg(value).arg(version);
        self.with_breaker(self.shared.client.send(command)).await.and_then(RemoteEntry::read)
    }

    /// Like [`get`](Self::get). If there is no value, also registers this process for the message that the load has ended.
    pub(crate) async fn get_or_wait(&self, cache: &str, key: &str) -> Option<RemoteEntry> {
        let (keys, args) = (self.shared.keys.for_key(cache, key), [milliseconds(WAITER_TTL)]);
        self.with_breaker(self.shared.client.eval(&GET_OR_WAIT, &keys, &args)).await.and_then(RemoteEntry::read)
    }

    /// Registers this process for the message that the load of a key has ended.
    pub(crate) async fn register_waiter(&self, cache: &str, key: &str) {
        let [.., waiting] = self.shared.keys.for_key(cache, key);
        let mut command = redis::cmd("SET");
        command.arg(waiting).arg("1").arg("PX").arg(milliseconds(WAITER_TTL));
        self.with_breaker(self.shared.client.send(command)).await;
    }

    /// Stores a value that was loaded after this version was read. `false` if the key was changed since; `true` also if Redis did not
    /// respond.
    pub(crate) async fn store(&self, cache: &str, key: &str, version: &[u8], value: &[u8], ttl: Duration) -> bool {
        let Shared { client, keys, .. } = &*self.shared;
        let (ttl_ms, message) = (milliseconds(ttl), message(cache, key));
        let args = [version, value, ttl_ms.as_bytes(), keys.load_ended.as_bytes(), message.as_bytes()];
        self.with_breaker(client.eval(&STORE, &keys.for_key(cache, key), &args)).await != Some(Value::Int(0))
    }

    /// Wakes the processes that wait for a load that has ended without storing a value. If that fails, they notice it by polling.
    pub(crate) async fn load_ended(&self, cache: &str, key: &str) {
        let [.., waiting] = self.shared.keys.for_key(cache, key);
        let args = [&self.shared.keys.load_ended, &message(cache, key)];
        self.with_breaker(self.shared.client.eval(&LOAD_ENDED, &[waiting], &args)).await;
    }

    /// The version of a key. `None` if Redis is unavailable.
    pub(crate) async fn version(&self, cache: &str, key: &str) -> Option<Vec<u8>> {
        let [_, version, _] = self.shared.keys.for_key(cache, key);
        let reply = self.with_breaker(self.shared.client.send(redis::cmd("GET").arg(version).to_owned())).await?;
        Option::<Vec<u8>>::from_redis_value(reply).ok().map(Option::unwrap_or_default)
    }

    /// Replaces the value of a key, and prevents loads in progress from storing theirs, if its version is still this one; otherwise
    /// invalidates the key and returns `false`. `None` if Redis did not confirm either.
    pub(crate) async fn put(&self, cache: &str, key: &str, before: &[u8], value: &[u8], ttl: Duration) -> Option<bool> {
        let (version, version_ttl_ms) = (random_version(), milliseconds(VERSION_TTL));
        let (ttl_ms, message) = (milliseconds(ttl), message(cache, key));
        let args: [&[u8]; 7] = [
            version.as_bytes(),
            version_ttl_ms.as_bytes(),
            self.shared.keys.invalidated.as_bytes(),
            message.as_bytes(),
            before,
            value,
            ttl_ms.as_bytes(),
        ];
        let put = self.shared.client.eval(&PUT, &self.shared.keys.for_key(cache, key)[..2], &args).await.ok()?;
        Some(put == Value::Int(1))
    }

    /// Invalidates a key. `false` if Redis did not confirm it.
    pub(crate) async fn invalidate(&self, cache: &str, key: &str) -> bool {
        let (version, version_ttl_ms) = (random_version(), milliseconds(VERSION_TTL));
        let args = [&version, &version_ttl_ms, &self.shared.keys.invalidated, &message(cache, key)];
        // Without the breaker: an invalidation must be attempted even if earlier calls have failed.
        self.shared.client.eval(&INVALIDATE, &self.shared.keys.for_key(cache, key)[..2], &args).await.is_ok()
    }

    /// Makes a call unless the breaker is open. `None` if it was skipped or failed.
    pub(crate) async fn with_breaker(&self, call: impl Future<Output = Result<Value, CommandError>>) -> Option<Value> {
        if !self.shared.breaker.allows_call() {
            return None;
        }
        match call.await {
            Ok(value) => {
                self.shared.breaker.record_success();
                Some(value)
            }
            // An error reply (out of memory, no permission) shows that Redis responds, so other commands may succeed.
            Err(CommandError::Refused(error)) => {
                tracing::debug!(%error, "Redis returned an error");
                self.shared.breaker.record_success();
                None
            }
            Err(failure) => {
                tracing::debug!(?failure, "Redis is unavailable; falling back to the source");
                self.shared.breaker.record_failure();
                None
            }
        }
    }
}

fn random_version() -> String {
    format!("{:016x}", rand::rng().random::<u64>())
}

fn milliseconds(time: Duration) -> String {
    time.as_millis().max(1).to_string()
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.subscription.abort();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}
