//! The filter in Redis, shared by all processes.
//!
//! | key | contents |
//! |---|---|
//! | `app:filter:{shop}` | a hash: id, seed, server run id and build time of the current generation; id, seed and server run id of the generation that is being built |
//! | `app:filter:{shop}:…` | the bits of a generation, and a marker bit after them |
//! | `app:lock:{filter:shop}` | the lock of the process that builds it |
//!
//! The marker bit is set when a build starts. If Redis loses the bits, later additions create the key again without the marker, which
//! shows that the bits are incomplete.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rand::RngExt as _;
use redis::{FromRedisValue as _, Value};
use stampede_lock::Guard;
use stampede_redis::{CommandError, Script};

use super::{AnnounceError, FilterConfig, MAX_BITS, bits_per_key};
use crate::builder::MAX_DURATION;
use crate::remote::Remote;

static CHECK: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_check.lua")));
static ANNOUNCE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_announce.lua")));
static FINISH: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_finish.lua")));

/// How often an announcement is retried if the generations change while it runs.
const ANNOUNCE_ATTEMPTS: usize = 5;
/// The minimum TTL of bits; longer than a build takes.
const MIN_BITS_TTL: Duration = Duration::from_secs(3600);
/// How long the result that there is no current filter is reused.
const UNKNOWN_TTL: Duration = Duration::from_millis(100);

type Error = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct SharedFilter {
    remote: Remote,
    name: String,
    meta_key: String,
    /// The size of generations that this process builds. Other processes may use another capacity.
    size: Size,
    view: RwLock<ViewState>,
}

/// The view of the filter that this process has cached.
#[derive(Debug, Clone)]
enum ViewState {
    Known(Arc<View>),
    /// No view. With the time if Redis had no usable filter then; without it the next caller asks Redis.
    Unknown(Option<Instant>),
}

#[derive(Debug)]
struct View {
    current: Generation,
    /// The number of the connection on which the view was read.
    connection: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    bits: u64,
    hashes: u64,
}

/// One build of the filter. The size is a part of the id, so that generations of different sizes are never confused.
#[derive(Debug, Clone)]
pub(crate) struct Generation {
    id: String,
    size: Size,
    seed: u64,
    /// The run id of the server on which the build started.
    run_id: String,
}

impl Generation {
    fn parse(id: String, seed: &str, run_id: String) -> Option<Self> {
        let mut parts = id.split('-');
        let (bits, hashes) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { size: Size { bits, hashes }, seed: seed.parse().ok()?, run_id, id })
    }

    /// The positions of the bits of a key. The seed is random, so that an attacker cannot choose missing keys that pass.
    fn positions(&self, key: &str) -> impl Iterator<Item = u64> {
        let Size { bits, hashes } = self.size;
        let start = mix(self.seed);
        let hash = key.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let (first, step) = (mix(hash), mix(hash ^ self.seed) | 1);
        (0..hashes).map(move |at| first.wrapping_add(at.wrapping_mul(step)) % bits)
    }
}

/// The metadata of the filter in Redis.
#[derive(Debug, Default)]
struct Meta {
    current: Option<Generation>,
    building: Option<Generation>,
    built_at_s: u64,
}

impl SharedFilter {
    pub(crate) fn new(remote: Remote, name: &str, capacity: usize) -> Self {
        let bits = (capacity.max(1) as f64 * bits_per_key()).clamp(1024.0, MAX_BITS).ceil();
        let hashes = (bits / capacity.max(1) as f64 * 2f64.ln()).round().clamp(1.0, 16.0);
        let (meta_key, view) =
            (format!("{}:filter:{{{name}}}", remote.application()), RwLock::new(ViewState::Unknown(None)));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped above")]
        let size = Size { bits: bits as u64, hashes: hashes as u64 };
        Self { remote, name: name.to_owned(), meta_key, size, view }
    }

    /// The maximum duration of an announcement.
    pub(crate) fn max_announce_duration(&self) -> Duration {
        let config = self.remote.config();
        // Two round trips, each of which may first wait for commands that were sent before.
        3 * config.connect_timeout + 4 * config.response_timeout
    }

    fn bits_key(&self, generation: &str) -> String {
        format!("{}:{generation}", self.meta_key)
    }

    /// `None` if there is no current filter.
    pub(crate) async fn may_exist(&self, key: &str) -> Option<bool> {
        for _ in 0..2 {
            let view = self.view().await?;
            let mut args = vec![view.current.id.clone(), view.current.size.bits.to_string()];
            args.extend(view.current.positions(key).map(|position| position.to_string()));
            let keys = [self.meta_key.clone(), self.bits_key(&view.current.id)];
            let reply = self.remote.with_breaker(self.remote.client().eval(&CHECK, &keys, &args)).await?;
            // After a reconnect the reply may come from a restarted server that has lost keys.
            if self.remote.client().connection_count() == view.connection {
                match reply {
                    Value::Int(0) => return Some(false),
                    Value::Int(1) => return Some(true),
                    _ => {}
                }
            }
            self.set_view(ViewState::Unknown(None));
        }
        None
    }

    fn set_view(&self, state: ViewState) {
        *self.view.write() = state;
    }

    /// The cached view; read from Redis again after every reconnect.
    async fn view(&self) -> Option<Arc<View>> {
        let state = self.view.read().clone();
        match state {
            ViewState::Known(view) if view.connection == self.remote.client().connection_count() => return Some(view),
            ViewState::Unknown(Some(at)) if at.elapsed() < UNKNOWN_TTL => return None,
            _ => {}
        }
        let view = self.fetch_view().await;
        self.set_view(view.clone().map_or_else(|| ViewState::Unknown(Some(Instant::now())), ViewState::Known));
        view
    }

    async fn fetch_view(&self) -> Option<Arc<View>> {
        let client = self.remote.client();
        let meta = self.remote.with_breaker(client.send(self.meta_command())).await.map(parse_meta)?;
        let connection = client.connection_count();
        let run_id = self.remote.with_breaker(client.send(info_command())).await.and_then(parse_run_id)?;
        // A server that was restarted since the build may have lost the last additions.
        let current =
            meta.current.filter(|current| current.run_id == run_id && client.connection_count() == connection)?;
        Some(Arc::new(View { current, connection }))
    }

    fn meta_command(&self) -> redis::Cmd {
        redis::cmd("HGETALL").arg(&self.meta_key).to_owned()
    }

    async fn meta(&self) -> Result<Meta, CommandError> {
        self.remote.client().send(self.meta_command()).await.map(parse_meta)
    }

    /// The run id of the server, which changes with every restart.
    async fn run_id(&self) -> Result<String, Error> {
        let value = self.send(info_command()).await?;
        parse_run_id(value)
            .ok_or_else(|| "the server does not report a run id; shared filters are not supported on a cluster".into())
    }

    /// The server's time in seconds.
    async fn now_s(&self) -> Result<u64, CommandError> {
        let time = self.remote.client().send(redis::cmd("TIME")).await?;
        Ok(<(u64, u64)>::from_redis_value(time).unwrap_or_default().0)
    }

    /// Adds a new key to the current generation and to the one that is being built.
    pub(crate) async fn announce(&self, key: &str) -> Result<(), AnnounceError> {
        for _ in 0..ANNOUNCE_ATTEMPTS {
            let meta = self.meta().await.map_err(|_| AnnounceError)?;
            let id = |generation: &Option<Generation>| {
                generation.as_ref().map(|generation| generation.id.clone()).unwrap_or_default()
            };
            let mut keys = vec![self.meta_key.clone()];
            let mut args = vec![id(&meta.current), id(&meta.building)];
            for generation in meta.current.iter().chain(&meta.building) {
                keys.push(self.bits_key(&generation.id));
                args.extend([generation.size.hashes.to_string(), generation.size.bits.to_string()]);
                args.extend(generation.positions(key).map(|position| position.to_string()));
            }
            let added = self.remote.client().eval(&ANNOUNCE, &keys, &args).await.map_err(|_| AnnounceError)?;
            if added == Value::Int(1) {
                return Ok(());
            }
        }
        Err(AnnounceError)
    }

    /// Starts to build a new generation. `None` if the current one is recent and intact, or another process is building one.
    pub(crate) async fn begin(&self, config: &FilterConfig) -> Result<Option<(Generation, Guard)>, Error> {
        let lock = self.remote.locks().simple(&format!("filter:{}", self.name))?;
        let guard = match lock.try_lock().await {
            Ok(guard) => guard,
            Err(stampede_lock::Error::NotAcquired { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (meta, run_id) = (self.meta().await?, self.run_id().await?);
        let expires_at_s = meta.built_at_s.saturating_add(config.rebuild_interval.as_secs());
        let is_recent = self.now_s().await? < expires_at_s;
        if let Some(current) = &meta.current
            && (&current.run_id, current.size) == (&run_id, self.size)
            && is_recent
            && self.is_intact(current).await?
        {
            guard.release().await?;
            return Ok(None);
        }
        let Size { bits, hashes } = self.size;
        let id = format!("{bits}-{hashes}-{:016x}", rand::rng().random::<u64>());
        let generation = Generation { id, size: self.size, seed: rand::rng().random(), run_id };
        let mut begin = redis::cmd("HSET");
        begin.arg(&self.meta_key).arg("building").arg(&generation.id);
        begin.arg("building_seed").arg(generation.seed).arg("building_run_id").arg(&generation.run_id);
        self.send(begin).await?;
        // The marker bit, which also allocates the bits.
        let mut allocate = redis::cmd("SETBIT");
        allocate.arg(self.bits_key(&generation.id)).arg(bits).arg(1);
        self.send(allocate).await?;
        // The expiry removes the bits of a process that died; bits in use are replaced long before.
        let mut expire = redis::cmd("PEXPIRE");
        let ttl = (3 * (config.rebuild_interval + config.max_create_delay)).clamp(MIN_BITS_TTL, MAX_DURATION);
        expire.arg(self.bits_key(&generation.id)).arg(ttl.as_millis().to_string());
        self.send(expire).await?;
        if let Some(abandoned) = meta.building {
            self.delete_bits(&abandoned).await;
        }
        Ok(Some((generation, guard)))
    }

    /// Deletes the bits of a generation that is not used. If that fails, they expire.
    pub(crate) async fn delete_bits(&self, generation: &Generation) {
        if let Err(error) = self.send(redis::cmd("DEL").arg(self.bits_key(&generation.id)).to_owned()).await {
            tracing::debug!(%error, "the bits of a filter could not be deleted; they will expire");
        }
    }

    async fn send(&self, command: redis::Cmd) -> Result<Value, Error> {
        Ok(self.remote.client().send(command).await?)
    }

    /// Whether the marker bit is still set.
    async fn is_intact(&self, generation: &Generation) -> Result<bool, Error> {
        let mut command = redis::cmd("GETBIT");
        command.arg(self.bits_key(&generation.id)).arg(generation.size.bits);
        Ok(self.send(command).await? == Value::Int(1))
    }

    pub(crate) async fn add(&self, generation: &Generation, keys: &[String]) -> Result<(), Error> {
        for chunk in keys.chunks(500) {
            let mut command = redis::cmd("BITFIELD");
            command.arg(self.bits_key(&generation.id));
            for position in chunk.iter().flat_map(|key| generation.positions(key)) {
                command.arg("SET").arg("u1").arg(position).arg(1);
            }
            self.send(command).await?;
        }
        Ok(())
    }

    /// Makes a built generation the current one. Fails if Redis may have lost bits during the build.
    pub(crate) async fn finish(&self, generation: &Generation) -> Result<(), Error> {
        let (meta, run_id) = (self.meta().await?, self.run_id().await?);
        let previous = meta.current.map_or_else(|| generation.id.clone(), |current| current.id);
        let keys = [self.meta_key.clone(), self.bits_key(&generation.id), self.bits_key(&previous)];
        if run_id != generation.run_id {
            return Err("Redis was restarted during the build".into());
        }
        let args = [generation.id.clone(), generation.seed.to_string(), run_id, generation.size.bits.to_string()];
        let reply = self.remote.client().eval(&FINISH, &keys, &args).await?;
        if reply == Value::Int(1) { Ok(()) } else { Err("the generation was lost or replaced during the build".into()) }
    }
}

fn info_command() -> redis::Cmd {
    redis::cmd("INFO").arg("server").to_owned()
}

/// `None` if the reply has no run id: a cluster replies for all nodes at once.
fn parse_run_id(value: Value) -> Option<String> {
    let info = String::from_redis_value(value).ok()?;
    let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"))?.trim().to_owned();
    (!run_id.is_empty()).then_some(run_id)
}

fn parse_meta(value: Value) -> Meta {
    let fields = HashMap::<String, String>::from_redis_value(value).unwrap_or_default();
    let field = |name: &str| fields.get(name).cloned();
    let generation = |id: &str, seed: &str, run_id: &str| Generation::parse(field(id)?, &field(seed)?, field(run_id)?);
    let (current, building) =
        (generation("current", "seed", "run_id"), generation("building", "building_seed", "building_run_id"));
    let built_at_s = field("built_at").and_then(|time| time.parse().ok()).unwrap_or(0);
    Meta { current, building, built_at_s }
}

/// Mixes the bits of a number (the finalizer of splitmix64).
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
