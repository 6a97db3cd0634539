//! What a lock costs beside the two bare commands that it cannot do without, on a private Redis, in one run:
//!
//! ```sh
//! cargo bench -p stampede-lock
//! ```
//!
//! All is measured in many short turns, and of each the fastest counts, so that whatever else the machine does meanwhile disturbs little;
//! what matters is the ratio. A ratio below its bar makes the exit code 1.

use std::future::Future;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Locks, Owner};
use stampede_testkit::redis as server;

const ROUNDS: usize = 60;
const PAIRS: usize = 250;
const AT_ONCE: usize = 256;
/// Compare and delete, and nothing else.
const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

const IN_PIPELINES: &str = "256 keys: bare pairs in two pipelines";
const BY_TASKS: &str = "256 keys: bare pairs by 256 tasks";
const SIMPLE_BY_TASKS: &str = "256 keys: simple";

/// What is compared with what, and the least that its speed may be of the other's. The bars leave room for the noise of a shared machine:
/// what was measured is in the README of this crate.
const BARS: [(&str, &str, f64); 6] = [
    ("simple", "bare pair", 0.85),
    ("re-entrant", "bare pair", 0.65),
    ("fair", "bare pair", 0.55),
    ("write", "bare pair", 0.55),
    (SIMPLE_BY_TASKS, BY_TASKS, 0.70),
    (SIMPLE_BY_TASKS, IN_PIPELINES, 0.55),
];
/// The most round trips from the call of release to the next one having the lock.
const MAX_HAND_OVER: f64 = 3.5;

#[tokio::main]
async fn main() -> ExitCode {
    let redis = server::start().expect("a private Redis");
    let url = server::url(redis.port());
    let bare = redis::Client::open(&*url).expect("a URL");
    let bare = Bare::new(bare.get_multiplexed_async_connection().await.expect("a connection")).await;
    let locks = Locks::connect(&*url, Config::default()).await.expect("a connection");
    let mut told = Told::default();
    for _ in 0..ROUNDS {
        one_at_a_time(&mut told, &bare, &locks).await;
        at_once(&mut told, &bare, &locks).await;
        hand_over(&mut told, &bare, &locks).await;
    }
    told.print();
    if told.below_bar() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// The two commands themselves.
#[derive(Clone)]
struct Bare {
    connection: MultiplexedConnection,
    release: String,
}

impl Bare {
    async fn new(mut connection: MultiplexedConnection) -> Self {
        let release = redis::cmd("SCRIPT").arg("LOAD").arg(RELEASE).query_async(&mut connection).await;
        Self { connection, release: release.expect("a hash") }
    }

    fn set(&self, key: &str, token: &str) -> redis::Cmd {
        redis::cmd("SET").arg(key).arg(token).arg("NX").arg("PX").arg(30_000).to_owned()
    }

    fn delete(&self, key: &str, token: &str) -> redis::Cmd {
        redis::cmd("EVALSHA").arg(&self.release).arg(1).arg(key).arg(token).to_owned()
    }

    async fn pair(&mut self, key: &str) {
        let token = format!("{:032x}", rand::random::<u128>());
        let set: redis::Value = self.set(key, &token).query_async(&mut self.connection).await.expect("an answer");
        assert_eq!(set, redis::Value::Okay);
        let gone: i64 = self.delete(key, &token).query_async(&mut self.connection).await.expect("an answer");
        assert_eq!(gone, 1);
    }
}

async fn one_at_a_time(told: &mut Told, bare: &Bare, locks: &Locks) {
    let mut one = bare.clone();
    told.time("bare pair", PAIRS, async {
        for _ in 0..PAIRS {
            one.pair("bare").await;
        }
    })
    .await;
    let owner = Owner::new();
    let kinds = [
        ("simple", locks.simple("simple")),
        ("re-entrant", locks.reentrant("reentrant", &owner)),
        ("fair", locks.fair("fair", &owner)),
        ("write", locks.read_write("write", &owner).map(|lock| lock.write().clone())),
    ];
    for (name, lock) in kinds {
        let lock = lock.expect("a lock");
        told.time(name, PAIRS, async {
            for _ in 0..PAIRS {
                lock.lock().await.expect("a guard").release().await.expect("released");
            }
        })
        .await;
    }
}

async fn at_once(told: &mut Told, bare: &Bare, locks: &Locks) {
    let each = 4;
    let pairs = AT_ONCE * each;
    let mut connection = bare.connection.clone();
    told.time(IN_PIPELINES, pairs, async {
        for _ in 0..each {
            let (mut set, mut delete) = (redis::pipe(), redis::pipe());
            for key in 0..AT_ONCE {
                let (key, token) = (format!("bare-{key}"), format!("{:032x}", rand::random::<u128>()));
                set.add_command(bare.set(&key, &token));
                delete.add_command(bare.delete(&key, &token));
            }
            let set: Vec<redis::Value> = set.query_async(&mut connection).await.expect("answers");
            assert!(set.iter().all(|set| *set == redis::Value::Okay));
            let gone: Vec<i64> = delete.query_async(&mut connection).await.expect("answers");
            assert!(gone.iter().all(|&gone| gone == 1));
        }
    })
    .await;
    told.time(
        BY_TASKS,
        pairs,
        together(|key| {
            let mut bare = bare.clone();
            async move {
                let key = format!("bare-{key}");
                for _ in 0..each {
                    bare.pair(&key).await;
                }
            }
        }),
    )
    .await;
    told.time(
        SIMPLE_BY_TASKS,
        pairs,
        together(|key| {
            let lock = locks.simple(&format!("simple-{key}")).expect("a lock");
            async move {
                for _ in 0..each {
                    lock.lock().await.expect("a guard").release().await.expect("released");
                }
            }
        }),
    )
    .await;
}

async fn together<F: Future<Output = ()> + Send + 'static>(work: impl Fn(usize) -> F) {
    let tasks: Vec<_> = (0..AT_ONCE).map(|key| tokio::spawn(work(key))).collect();
    for task in tasks {
        task.await.expect("a task");
    }
}

/// From the call of release to the next one having it, in round trips of a bare command.
async fn hand_over(told: &mut Told, bare: &Bare, locks: &Locks) {
    let hops = 100;
    let mut connection = bare.connection.clone();
    told.time("round trip", hops, async {
        for _ in 0..hops {
            let _: redis::Value = redis::cmd("PING").query_async(&mut connection).await.expect("an answer");
        }
    })
    .await;
    // Two that take turns: somebody always waits. Each hand-over is one hop.
    told.time("hand-over", hops, async {
        let players: Vec<_> = (0..2)
            .map(|_| {
                let lock = locks.fair("ball", &Owner::new()).expect("a lock");
                tokio::spawn(async move {
                    for _ in 0..hops / 2 {
                        lock.lock().await.expect("a guard").release().await.expect("released");
                    }
                })
            })
            .collect();
        for player in players {
            player.await.expect("a task");
        }
    })
    .await;
}

/// Times by name, in the order in which they were first told.
#[derive(Default)]
struct Told(Vec<(&'static str, Vec<f64>)>);

impl Told {
    async fn time(&mut self, name: &'static str, times: usize, work: impl Future<Output = ()>) {
        let started = Instant::now();
        work.await;
        let each = started.elapsed().as_secs_f64() * 1e6 / f64::from(u32::try_from(times).expect("a small number"));
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, all)) => all.push(each),
            None => self.0.push((name, vec![each])),
        }
    }

    fn fastest(&self, name: &str) -> f64 {
        let all = &self.0.iter().find(|(known, _)| *known == name).expect("measured").1;
        all.iter().copied().fold(f64::INFINITY, f64::min)
    }

    #[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
    fn print(&self) {
        for (name, _) in &self.0 {
            println!("{name:<40} {:>8.1} µs", self.fastest(name));
        }
    }

    /// Compares everything with its bar, and says so.
    #[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
    fn below_bar(&self) -> bool {
        let mut below = false;
        for (name, base, bar) in BARS {
            let ratio = self.fastest(base) / self.fastest(name);
            below |= ratio < bar;
            println!("{name} is {ratio:.2} of {base}, at least {bar:.2}{}", verdict(ratio >= bar));
        }
        let hops = self.fastest("hand-over") / self.fastest("round trip");
        let round_trip = Duration::from_secs_f64(self.fastest("round trip") / 1e6);
        let said = verdict(hops <= MAX_HAND_OVER);
        println!("a hand-over takes {hops:.1} round trips of {round_trip:?}, at most {MAX_HAND_OVER:.1}{said}");
        below | (hops > MAX_HAND_OVER)
    }
}

fn verdict(holds: bool) -> &'static str {
    if holds { "" } else { ": BELOW THE BAR" }
}
