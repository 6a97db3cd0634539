//! The cost of a lock compared with the two plain commands that it needs at least, on a private Redis, in one run:
//!
//! ```sh
//! cargo bench -p stampede-lock
//! ```
//!
//! Everything is measured in many short rounds, of which the fastest counts, so that other load on the machine has little influence. The
//! exit code is 1 if a ratio is below its minimum.

use std::future::Future;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Locks, Owner};
use stampede_testkit::redis as server;

const ROUNDS: usize = 60;
const PAIRS: usize = 250;
const TASKS: usize = 256;
/// Compare and delete, and nothing else.
const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

const IN_PIPELINES: &str = "256 keys: plain pairs in two pipelines";
const BY_TASKS: &str = "256 keys: plain pairs by 256 tasks";
const SIMPLE_BY_TASKS: &str = "256 keys: simple";

/// Name, baseline, and the minimum speed relative to the baseline. The minimums leave room for the noise of a shared machine; the
/// measured values are in the README of this crate.
const MINIMUMS: [(&str, &str, f64); 6] = [
    ("simple", "plain pair", 0.85),
    ("re-entrant", "plain pair", 0.65),
    ("fair", "plain pair", 0.55),
    ("write", "plain pair", 0.55),
    (SIMPLE_BY_TASKS, BY_TASKS, 0.70),
    (SIMPLE_BY_TASKS, IN_PIPELINES, 0.55),
];
/// The maximum round trips from the call of `release` to the next acquisition by a waiter.
const MAX_HAND_OVER: f64 = 3.5;

#[tokio::main]
async fn main() -> ExitCode {
    let redis = server::start().expect("a private Redis");
    let url = server::url(redis.port());
    let client = redis::Client::open(&*url).expect("a URL");
    let plain = Plain::new(client.get_multiplexed_async_connection().await.expect("a connection")).await;
    let locks = Locks::connect(&*url, Config::default()).await.expect("a connection");
    let mut timings = Timings::default();
    for _ in 0..ROUNDS {
        sequential(&mut timings, &plain, &locks).await;
        concurrent(&mut timings, &plain, &locks).await;
        hand_over(&mut timings, &plain, &locks).await;
    }
    timings.print();
    if timings.has_failures() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// The two plain commands.
#[derive(Clone)]
struct Plain {
    connection: MultiplexedConnection,
    release: String,
}

impl Plain {
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
        let set: redis::Value = self.set(key, &token).query_async(&mut self.connection).await.expect("a reply");
        assert_eq!(set, redis::Value::Okay);
        let deleted: i64 = self.delete(key, &token).query_async(&mut self.connection).await.expect("a reply");
        assert_eq!(deleted, 1);
    }
}

async fn sequential(timings: &mut Timings, plain: &Plain, locks: &Locks) {
    let mut one = plain.clone();
    timings
        .time("plain pair", PAIRS, async {
            for _ in 0..PAIRS {
                one.pair("plain").await;
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
        timings
            .time(name, PAIRS, async {
                for _ in 0..PAIRS {
                    lock.lock().await.expect("a guard").release().await.expect("released");
                }
            })
            .await;
    }
}

async fn concurrent(timings: &mut Timings, plain: &Plain, locks: &Locks) {
    let each = 4;
    let pairs = TASKS * each;
    let mut connection = plain.connection.clone();
    timings
        .time(IN_PIPELINES, pairs, async {
            for _ in 0..each {
                let (mut set, mut delete) = (redis::pipe(), redis::pipe());
                for key in 0..TASKS {
                    let (key, token) = (format!("plain-{key}"), format!("{:032x}", rand::random::<u128>()));
                    set.add_command(plain.set(&key, &token));
                    delete.add_command(plain.delete(&key, &token));
                }
                let set: Vec<redis::Value> = set.query_async(&mut connection).await.expect("replies");
                assert!(set.iter().all(|set| *set == redis::Value::Okay));
                let deleted: Vec<i64> = delete.query_async(&mut connection).await.expect("replies");
                assert!(deleted.iter().all(|&deleted| deleted == 1));
            }
        })
        .await;
    timings
        .time(
            BY_TASKS,
            pairs,
            spawn_tasks(|key| {
                let mut plain = plain.clone();
                async move {
                    let key = format!("plain-{key}");
                    for _ in 0..each {
                        plain.pair(&key).await;
                    }
                }
            }),
        )
        .await;
    timings
        .time(
            SIMPLE_BY_TASKS,
            pairs,
            spawn_tasks(|key| {
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

async fn spawn_tasks<F: Future<Output = ()> + Send + 'static>(work: impl Fn(usize) -> F) {
    let tasks: Vec<_> = (0..TASKS).map(|key| tokio::spawn(work(key))).collect();
    for task in tasks {
        task.await.expect("a task");
    }
}

/// The time from the call of `release` to the next acquisition by a waiter, in round trips of a plain command.
async fn hand_over(timings: &mut Timings, plain: &Plain, locks: &Locks) {
    let hops = 100;
    let mut connection = plain.connection.clone();
    timings
        .time("round trip", hops, async {
            for _ in 0..hops {
                let _: redis::Value = redis::cmd("PING").query_async(&mut connection).await.expect("a reply");
            }
        })
        .await;
    // Two tasks take turns, so that one of them always waits. Each hand-over is one hop.
    timings
        .time("hand-over", hops, async {
            let tasks: Vec<_> = (0..2)
                .map(|_| {
                    let lock = locks.fair("hand-over", &Owner::new()).expect("a lock");
                    tokio::spawn(async move {
                        for _ in 0..hops / 2 {
                            lock.lock().await.expect("a guard").release().await.expect("released");
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("a task");
            }
        })
        .await;
}

/// Times in microseconds by name, in the order of their first measurement.
#[derive(Default)]
struct Timings(Vec<(&'static str, Vec<f64>)>);

impl Timings {
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

    #[expect(clippy::print_stdout, reason = "a benchmark prints its results")]
    fn print(&self) {
        for (name, _) in &self.0 {
            println!("{name:<40} {:>8.1} µs", self.fastest(name));
        }
    }

    /// Prints the ratios. Returns whether one is below its minimum.
    #[expect(clippy::print_stdout, reason = "a benchmark prints its results")]
    fn has_failures(&self) -> bool {
        let mut failed = false;
        for (name, base, minimum) in MINIMUMS {
            let ratio = self.fastest(base) / self.fastest(name);
            failed |= ratio < minimum;
            println!("{name} is {ratio:.2} of {base}, at least {minimum:.2}{}", verdict(ratio >= minimum));
        }
        let hops = self.fastest("hand-over") / self.fastest("round trip");
        let round_trip = Duration::from_secs_f64(self.fastest("round trip") / 1e6);
        let verdict = verdict(hops <= MAX_HAND_OVER);
        println!("a hand-over takes {hops:.1} round trips of {round_trip:?}, at most {MAX_HAND_OVER:.1}{verdict}");
        failed | (hops > MAX_HAND_OVER)
    }
}

fn verdict(holds: bool) -> &'static str {
    if holds { "" } else { ": FAILED" }
}
