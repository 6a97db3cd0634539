//! In Redis, for all processes.
//!
//! | key | holds |
//! |---|---|
//! | `filter:{shop}` | a hash: the current generation, its seed, the run of the server it was filled in and since when; the generation that is being filled, and its seed |
//! | `filter:{shop}:…` | the bits of a generation, and one more that says that they are whole |
//! | `lock:{filter:shop}` | the lock of who fills it |

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};
use std::time::Duration;

use rand::RngExt as _;
use redis::{FromRedisValue as _, Value};
use stampede_lock::Guard;
use stampede_redis::{Failure, Script};

use super::{FALSE_POSITIVES, Generation, Unannounced};
use crate::remote::Remote;

static CHECK: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_check.lua")));
static ANNOUNCE: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_announce.lua")));
static FINISH: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("../lua/filter_finish.lua")));

/// The longest string that Redis takes, in bits, less a little.
const MAX_BITS: f64 = 4.0e9;
/// How often an announcement is tried anew if the filter changes under it.
const TRIES: usize = 5;

type Error = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct Shared {
    remote: Remote,
    name: String,
    main: String,
    bits: u64,
    hashes: u64,
    /// What we know of the filter, and on which connection we learned it.
    view: RwLock<Option<Arc<View>>>,
}

#[derive(Debug)]
struct View {
    current: Generation,
    connection: u64,
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
        let wanted = -(capacity.max(1) as f64) * FALSE_POSITIVES.ln() / (2f64.ln() * 2f64.ln());
        let bits = wanted.clamp(1024.0, MAX_BITS).ceil();
        let hashes = (bits / capacity.max(1) as f64 * 2f64.ln()).round().clamp(1.0, 16.0);
        let (main, view) = (format!("filter:{{{name}}}"), RwLock::default());
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped above")]
        let (bits, hashes) = (bits as u64, hashes as u64);
        Self { remote, name: name.to_owned(), main, bits, hashes, view }
    }

    fn bits_of(&self, generation: &str) -> String {
        format!("{}:{generation}", self.main)
    }

    /// Where a key's bits are. The seed is random, so that nobody can choose keys that pass.
    fn positions(&self, key: &str, seed: u64) -> impl Iterator<Item = u64> {
        let hash = key.bytes().fold(mix(seed), |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let (first, step) = (mix(hash), mix(hash ^ seed) | 1);
        let bits = self.bits;
        (0..self.hashes).map(move |at| first.wrapping_add(at.wrapping_mul(step)) % bits)
    }

    /// `None` if nobody knows.
    pub(crate) async fn may_exist(&self, key: &str) -> Option<bool> {
        for _ in 0..2 {
            let view = self.view().await?;
            let mut args = vec![view.current.id.clone(), self.bits.to_string()];
            args.extend(self.positions(key, view.current.seed).map(|position| position.to_string()));
            let keys = [self.main.clone(), self.bits_of(&view.current.id)];
            let answer = self.remote.guarded(self.remote.link().run(&CHECK, &keys, &args)).await?;
            // Answered on the connection that the view belongs to, or by a server that may have forgotten something?
            if self.remote.link().connections() == view.connection {
                match answer {
                    Value::Int(0) => return Some(false),
                    Value::Int(1) => return Some(true),
                    _ => {}
                }
            }
            *self.view.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
        None
    }

    /// What we know of the filter; asked for anew after every new connection.
    async fn view(&self) -> Option<Arc<View>> {
        let link = self.remote.link();
        let known = self.view.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(view) = known.filter(|view| view.connection == link.connections()) {
            return Some(view);
        }
        let meta = self.meta().await.ok()?;
        let connection = link.connections();
        let run = self.run().await.ok()?;
        // If the server was restarted since, it may have forgotten what it was told last.
        let current = meta.current.filter(|current| current.run == run && link.connections() == connection)?;
        let view = Arc::new(View { current, connection });
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Some(view.clone());
        Some(view)
    }

    async fn meta(&self) -> Result<Meta, Failure> {
        let mut command = redis::cmd("HGETALL");
        command.arg(&self.main);
        let value = self.remote.link().send(command).await?;
        let mut fields = HashMap::<String, String>::from_redis_value(value).unwrap_or_default();
        let mut generation = |id: &str, seed: &str| {
            let (id, seed) = (fields.remove(id)?, fields.remove(seed)?);
            let run = fields.get("run").cloned().unwrap_or_default();
            Some(Generation { id, seed: seed.parse().ok()?, run })
        };
        let (current, filling) = (generation("current", "seed"), generation("filling", "filling_seed"));
        let since_s = fields.remove("since").and_then(|since| since.parse().ok()).unwrap_or(0);
        Ok(Meta { current, filling, since_s })
    }

    /// Which run of the server this is.
    async fn run(&self) -> Result<String, Failure> {
        let mut command = redis::cmd("INFO");
        command.arg("server");
        let info = String::from_redis_value(self.remote.link().send(command).await?).unwrap_or_default();
        Ok(info.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().trim().to_owned())
    }

    /// The server's time in seconds.
    async fn now_s(&self) -> Result<u64, Failure> {
        let time = self.remote.link().send(redis::cmd("TIME")).await?;
        Ok(<(u64, u64)>::from_redis_value(time).unwrap_or_default().0)
    }

    pub(crate) async fn announce(&self, key: &str) -> Result<(), Unannounced> {
        for _ in 0..TRIES {
            let meta = self.meta().await.map_err(|_| Unannounced)?;
            let id =
                |generation: &Option<Generation>| generation.as_ref().map(|known| known.id.clone()).unwrap_or_default();
            let mut keys = vec![self.main.clone()];
            let mut args = vec![id(&meta.current), id(&meta.filling), self.hashes.to_string(), self.bits.to_string()];
            for generation in meta.current.iter().chain(&meta.filling) {
                keys.push(self.bits_of(&generation.id));
                args.extend(self.positions(key, generation.seed).map(|position| position.to_string()));
            }
            let added = self.remote.link().run(&ANNOUNCE, &keys, &args).await.map_err(|_| Unannounced)?;
            if added == Value::Int(1) {
                return Ok(());
            }
        }
        Err(Unannounced)
    }

    /// Begins to fill a new generation. `None` if the current one is good and young, or somebody else is at it.
    pub(crate) async fn begin(&self, refill_every: Duration) -> Result<Option<(Generation, Guard)>, Error> {
        let lock = self.remote.locks().simple(&format!("filter:{}", self.name))?;
        let guard = match lock.try_lock().await {
            Ok(guard) => guard,
            Err(stampede_lock::Error::NotAcquired { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let (meta, run, now_s) =
            (self.meta().await.map_err(told)?, self.run().await.map_err(told)?, self.now_s().await.map_err(told)?);
        let young = now_s < meta.since_s.saturating_add(refill_every.as_secs());
        if let Some(current) = &meta.current
            && current.run == run
            && young
            && self.is_whole(&current.id).await?
        {
            guard.release().await?;
            return Ok(None);
        }
        let (id, seed) = (format!("{:016x}", rand::rng().random::<u64>()), rand::rng().random::<u64>());
        let generation = Generation { id, seed, run };
        // The last bit says that they are whole: if Redis forgets them, those that are set later do not have it.
        let mut allocate = redis::cmd("SETBIT");
        allocate.arg(self.bits_of(&generation.id)).arg(self.bits).arg(1);
        self.send(allocate).await?;
        let mut begin = redis::cmd("HSET");
        begin.arg(&self.main).arg("filling").arg(&generation.id).arg("filling_seed").arg(generation.seed);
        self.send(begin).await?;
        if let Some(left) = meta.filling {
            let mut delete = redis::cmd("DEL");
            delete.arg(self.bits_of(&left.id));
            self.send(delete).await?;
        }
        Ok(Some((generation, guard)))
    }

    async fn send(&self, command: redis::Cmd) -> Result<Value, Error> {
        self.remote.link().send(command).await.map_err(told)
    }

    async fn is_whole(&self, generation: &str) -> Result<bool, Error> {
        let mut command = redis::cmd("GETBIT");
        command.arg(self.bits_of(generation)).arg(self.bits);
        Ok(self.send(command).await? == Value::Int(1))
    }

    pub(crate) async fn add(&self, generation: &Generation, keys: &[String]) -> Result<(), Error> {
        for some in keys.chunks(500) {
            let mut command = redis::cmd("BITFIELD");
            command.arg(self.bits_of(&generation.id));
            for position in some.iter().flat_map(|key| self.positions(key, generation.seed)) {
                command.arg("SET").arg("u1").arg(position).arg(1);
            }
            self.send(command).await?;
        }
        Ok(())
    }

    /// It is filled. If Redis forgot something meanwhile, it is not.
    pub(crate) async fn finish(&self, generation: &Generation) -> Result<(), Error> {
        let (meta, run) = (self.meta().await.map_err(told)?, self.run().await.map_err(told)?);
        let before = meta.current.map_or_else(|| generation.id.clone(), |current| current.id);
        let keys = [self.main.clone(), self.bits_of(&generation.id), self.bits_of(&before)];
        if run != generation.run {
            return Err("Redis was restarted meanwhile".into());
        }
        let args = [generation.id.clone(), generation.seed.to_string(), run, self.bits.to_string()];
        let done = self.remote.link().run(&FINISH, &keys, &args).await.map_err(told)?;
        if done == Value::Int(1) { Ok(()) } else { Err("it was forgotten, or begun anew, meanwhile".into()) }
    }
}

fn told(failure: Failure) -> Error {
    match failure {
        Failure::NotSent(error) | Failure::Unknown(error) | Failure::Refused(error) => error.into(),
    }
}

/// Spreads the bits of a number over all of it (the finish of splitmix64).
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
