//! In Redis, for all processes.
//!
//! | key | holds |
//! |---|---|
//! | `app:filter:{shop}` | a hash: the current generation, its seed, the run of the server it was filled in and since when; the generation that is being filled, and its seed |
//! | `app:filter:{shop}:…` | the bits of a generation, and one more that says that they are whole |
//! | `app:lock:{filter:shop}` | the lock of who fills it |

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rand::RngExt as _;
use redis::{FromRedisValue as _, Value};
use stampede_lock::Guard;
use stampede_redis::{CommandError, Script};

use super::{FilterSettings, MAX_BITS, Unannounced, bits_per_key};
use crate::builder::LONGEST;
use crate::remote::Remote;

static CHECK: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_check.lua")));
static ANNOUNCE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_announce.lua")));
static FINISH: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_finish.lua")));

/// How often an announcement is tried anew if the filter changes under it.
const TRIES: usize = 5;
/// Bits that are not used any more are kept for at least so long: longer than it takes to fill them.
const MIN_KEPT: Duration = Duration::from_secs(3600);

/// After it was found that nobody knows, so long everybody is told so.
const NOBODY_KNOWS: Duration = Duration::from_millis(100);

type Error = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct Shared {
    remote: Remote,
    name: String,
    main: String,
    /// The size of what we fill. What others fill may be of another.
    size: Size,
    view: RwLock<Seen>,
}

/// What we know of the filter.
#[derive(Debug, Clone)]
enum Seen {
    View(Arc<View>),
    /// Nobody knew, then.
    Nothing(Option<Instant>),
}

#[derive(Debug)]
struct View {
    current: Generation,
    /// The connection on which we learned it.
    connection: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    bits: u64,
    hashes: u64,
}

/// One filling of the filter. Its size is a part of its id, so that nobody can take it for another.
#[derive(Debug, Clone)]
pub(crate) struct Generation {
    id: String,
    size: Size,
    seed: u64,
    /// The run of the server in which it was begun.
    run: String,
}

impl Generation {
    fn read(id: String, seed: &str, run: String) -> Option<Self> {
        let mut parts = id.split('-');
        let (bits, hashes) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { size: Size { bits, hashes }, seed: seed.parse().ok()?, run, id })
    }

    /// Where a key's bits are. The seed is random, so that nobody can choose keys that pass.
    fn positions(&self, key: &str) -> impl Iterator<Item = u64> {
        let Size { bits, hashes } = self.size;
        let start = mix(self.seed);
        let hash = key.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let (first, step) = (mix(hash), mix(hash ^ self.seed) | 1);
        (0..hashes).map(move |at| first.wrapping_add(at.wrapping_mul(step)) % bits)
    }
}

/// What Redis knows of the filter.
#[derive(Debug, Default)]
struct Meta {
    current: Option<Generation>,
    filling: Option<Generation>,
    since_s: u64,
}

impl Shared {
    pub(crate) fn new(remote: Remote, name: &str, capacity: usize) -> Self {
        let bits = (capacity.max(1) as f64 * bits_per_key()).clamp(1024.0, MAX_BITS).ceil();
        let hashes = (bits / capacity.max(1) as f64 * 2f64.ln()).round().clamp(1.0, 16.0);
        let (main, view) = (format!("{}:filter:{{{name}}}", remote.application()), RwLock::new(Seen::Nothing(None)));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped above")]
        let size = Size { bits: bits as u64, hashes: hashes as u64 };
        Self { remote, name: name.to_owned(), main, size, view }
    }

    /// How long an announcement may take.
    pub(crate) fn announced_within(&self) -> Duration {
        let config = self.remote.config();
        // It asks twice, and may have to wait for what was asked before.
        3 * config.connect_within + 4 * config.answer_within
    }

    fn bits_of(&self, generation: &str) -> String {
        format!("{}:{generation}", self.main)
    }

    /// `None` if nobody knows.
    pub(crate) async fn may_exist(&self, key: &str) -> Option<bool> {
        for _ in 0..2 {
            let view = self.view().await?;
            let mut args = vec![view.current.id.clone(), view.current.size.bits.to_string()];
            args.extend(view.current.positions(key).map(|position| position.to_string()));
            let keys = [self.main.clone(), self.bits_of(&view.current.id)];
            let answer = self.remote.guarded(self.remote.link().eval(&CHECK, &keys, &args)).await?;
            // Answered on the connection that the view belongs to, or by a server that may have forgotten something?
            if self.remote.link().connection_count() == view.connection {
                match answer {
                    Value::Int(0) => return Some(false),
                    Value::Int(1) => return Some(true),
                    _ => {}
                }
            }
            self.see(Seen::Nothing(None));
        }
        None
    }

    fn see(&self, seen: Seen) {
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = seen;
    }

    /// What we know of the filter; asked for anew after every new connection.
    async fn view(&self) -> Option<Arc<View>> {
        let seen = self.view.read().unwrap_or_else(PoisonError::into_inner).clone();
        match seen {
            Seen::View(view) if view.connection == self.remote.link().connection_count() => return Some(view),
            Seen::Nothing(Some(at)) if at.elapsed() < NOBODY_KNOWS => return None,
            _ => {}
        }
        let view = self.look().await;
        self.see(view.clone().map_or_else(|| Seen::Nothing(Some(Instant::now())), Seen::View));
        view
    }

    async fn look(&self) -> Option<Arc<View>> {
        let link = self.remote.link();
        let meta = self.remote.guarded(link.send(self.ask_meta())).await.map(read_meta)?;
        let connection = link.connection_count();
        let run = self.remote.guarded(link.send(ask_run())).await.and_then(read_run)?;
        // If the server was restarted since, it may have forgotten what it was told last.
        let current = meta.current.filter(|current| current.run == run && link.connection_count() == connection)?;
        Some(Arc::new(View { current, connection }))
    }

    fn ask_meta(&self) -> redis::Cmd {
        redis::cmd("HGETALL").arg(&self.main).to_owned()
    }

    async fn meta(&self) -> Result<Meta, CommandError> {
        self.remote.link().send(self.ask_meta()).await.map(read_meta)
    }

    /// Which run of the server this is.
    async fn run(&self) -> Result<String, Error> {
        let value = self.send(ask_run()).await?;
        read_run(value).ok_or_else(|| "the server does not tell its run; on a cluster there is no shared filter".into())
    }

    /// The server's time in seconds.
    async fn now_s(&self) -> Result<u64, CommandError> {
        let time = self.remote.link().send(redis::cmd("TIME")).await?;
        Ok(<(u64, u64)>::from_redis_value(time).unwrap_or_default().0)
    }

    pub(crate) async fn announce(&self, key: &str) -> Result<(), Unannounced> {
        for _ in 0..TRIES {
            let meta = self.meta().await.map_err(|_| Unannounced)?;
            let id =
                |generation: &Option<Generation>| generation.as_ref().map(|known| known.id.clone()).unwrap_or_default();
            let mut keys = vec![self.main.clone()];
            let mut args = vec![id(&meta.current), id(&meta.filling)];
            for generation in meta.current.iter().chain(&meta.filling) {
                keys.push(self.bits_of(&generation.id));
                args.extend([generation.size.hashes.to_string(), generation.size.bits.to_string()]);
                args.extend(generation.positions(key).map(|position| position.to_string()));
            }
            let added = self.remote.link().eval(&ANNOUNCE, &keys, &args).await.map_err(|_| Unannounced)?;
            if added == Value::Int(1) {
                return Ok(());
            }
        }
        Err(Unannounced)
    }

    /// Begins to fill a new generation. `None` if the current one is good and young, or somebody else is at it.
    pub(crate) async fn begin(&self, settings: &FilterSettings) -> Result<Option<(Generation, Guard)>, Error> {
        let lock = self.remote.locks().simple(&format!("filter:{}", self.name))?;
        let guard = match lock.try_lock().await {
            Ok(guard) => guard,
            Err(stampede_lock::Error::NotAcquired { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (meta, run) = (self.meta().await.map_err(told)?, self.run().await?);
        let young = self.now_s().await.map_err(told)? < meta.since_s.saturating_add(settings.refill_every.as_secs());
        if let Some(current) = &meta.current
            && (&current.run, current.size) == (&run, self.size)
            && young
            && self.is_whole(current).await?
        {
            guard.release().await?;
            return Ok(None);
        }
        let Size { bits, hashes } = self.size;
        let id = format!("{bits}-{hashes}-{:016x}", rand::rng().random::<u64>());
        let generation = Generation { id, size: self.size, seed: rand::rng().random(), run };
        let mut begin = redis::cmd("HSET");
        begin.arg(&self.main).arg("filling").arg(&generation.id);
        begin.arg("filling_seed").arg(generation.seed).arg("filling_run").arg(&generation.run);
        self.send(begin).await?;
        // The last bit says that they are whole: if Redis forgets them, those that are set later do not have it.
        let mut allocate = redis::cmd("SETBIT");
        allocate.arg(self.bits_of(&generation.id)).arg(bits).arg(1);
        self.send(allocate).await?;
        // The bits of a process that died do not stay for ever; those in use are replaced long before.
        let mut expire = redis::cmd("PEXPIRE");
        let kept_for = (3 * (settings.refill_every + settings.create_within)).clamp(MIN_KEPT, LONGEST);
        expire.arg(self.bits_of(&generation.id)).arg(kept_for.as_millis().to_string());
        self.send(expire).await?;
        if let Some(left) = meta.filling {
            self.drop_bits(&left).await;
        }
        Ok(Some((generation, guard)))
    }

    /// They are of no use. If that cannot be told, they expire.
    pub(crate) async fn drop_bits(&self, generation: &Generation) {
        if let Err(error) = self.send(redis::cmd("DEL").arg(self.bits_of(&generation.id)).to_owned()).await {
            tracing::debug!(%error, "the bits of a filter are left to expire");
        }
    }

    async fn send(&self, command: redis::Cmd) -> Result<Value, Error> {
        self.remote.link().send(command).await.map_err(told)
    }

    async fn is_whole(&self, generation: &Generation) -> Result<bool, Error> {
        let mut command = redis::cmd("GETBIT");
        command.arg(self.bits_of(&generation.id)).arg(generation.size.bits);
        Ok(self.send(command).await? == Value::Int(1))
    }

    pub(crate) async fn add(&self, generation: &Generation, keys: &[String]) -> Result<(), Error> {
        for some in keys.chunks(500) {
            let mut command = redis::cmd("BITFIELD");
            command.arg(self.bits_of(&generation.id));
            for position in some.iter().flat_map(|key| generation.positions(key)) {
                command.arg("SET").arg("u1").arg(position).arg(1);
            }
            self.send(command).await?;
        }
        Ok(())
    }

    /// It is filled. If Redis forgot something meanwhile, it is not.
    pub(crate) async fn finish(&self, generation: &Generation) -> Result<(), Error> {
        let (meta, run) = (self.meta().await.map_err(told)?, self.run().await?);
        let before = meta.current.map_or_else(|| generation.id.clone(), |current| current.id);
        let keys = [self.main.clone(), self.bits_of(&generation.id), self.bits_of(&before)];
        if run != generation.run {
            return Err("Redis was restarted meanwhile".into());
        }
        let args = [generation.id.clone(), generation.seed.to_string(), run, generation.size.bits.to_string()];
        let done = self.remote.link().eval(&FINISH, &keys, &args).await.map_err(told)?;
        if done == Value::Int(1) { Ok(()) } else { Err("it was forgotten, or begun anew, meanwhile".into()) }
    }
}

fn ask_run() -> redis::Cmd {
    redis::cmd("INFO").arg("server").to_owned()
}

/// `None` if it is not told: a cluster answers for all nodes at once.
fn read_run(value: Value) -> Option<String> {
    let info = String::from_redis_value(value).ok()?;
    let run = info.lines().find_map(|line| line.strip_prefix("run_id:"))?.trim().to_owned();
    (!run.is_empty()).then_some(run)
}

fn read_meta(value: Value) -> Meta {
    let fields = HashMap::<String, String>::from_redis_value(value).unwrap_or_default();
    let field = |name: &str| fields.get(name).cloned();
    let generation = |id: &str, seed: &str, run: &str| Generation::read(field(id)?, &field(seed)?, field(run)?);
    let (current, filling) =
        (generation("current", "seed", "run"), generation("filling", "filling_seed", "filling_run"));
    let since_s = field("since").and_then(|since| since.parse().ok()).unwrap_or(0);
    Meta { current, filling, since_s }
}

fn told(failure: CommandError) -> Error {
    match failure {
        CommandError::NotSent(error) | CommandError::Unknown(error) | CommandError::Refused(error) => error.into(),
    }
}

/// Spreads the bits of a number over all of it (the finish of splitmix64).
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
