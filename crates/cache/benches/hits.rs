//! What a hit costs beside the bare thing, and how long a change takes to be seen elsewhere, on a private Redis, in one run:
//!
//! ```sh
//! cargo bench -p stampede-cache
//! ```
//!
//! All is measured in many short turns. Of each the fastest tenth counts: the other turns measure what else the machine does. It exits
//! with 1 if a ratio is below its bar.

use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
use stampede_testkit::redis as server;

/// A bare moka get over a hit in the process, at least: a second lookup would be below it.
const LOCAL_BAR: f64 = 0.5;
/// A bare `GET` with decoding over a hit in Redis, at least: a second round trip would be below it, a busy machine is not.
const REMOTE_BAR: f64 = 0.65;
const ROUNDS: usize = 100;
const LOCAL: u32 = 20_000;
const REMOTE: u32 = 300;
const CHANGES: u32 = 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Shop {
    id: u64,
    name: String,
    address: String,
}

fn shop(id: u64) -> Shop {
    Shop { id, name: format!("Shop number {id}"), address: "12 Long Street, behind the market".to_owned() }
}

type Shops = Cache<u64, Shop, Infallible>;

async fn get(cache: &Shops, id: u64) -> Option<Arc<Shop>> {
    cache.get_or_load(&id, move || async move { Ok(Some(shop(id))) }).await.expect("a value")
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "a benchmark tells what it measured")]
async fn main() -> ExitCode {
    let redis = server::start().expect("a private Redis");
    let url = server::url(redis.port());
    let remote = || Remote::new("bench", &*url, RemoteConfig::default()).expect("an address");
    let local: Shops = Builder::new("local").build();
    let bare: moka::sync::Cache<u64, Arc<Shop>> = moka::sync::Cache::new(10_000);
    for id in 0..1000 {
        get(&local, id).await;
        bare.insert(id, Arc::new(shop(id)));
    }
    // Nothing stays in the process: every get asks Redis.
    let behind: Shops = Builder::new("behind").local(0, Duration::ZERO).remote(remote()).build();
    let connection = redis::Client::open(&*url).expect("a URL").get_multiplexed_async_connection().await;
    let mut connection = connection.expect("a connection");
    for id in 0..100 {
        get(&behind, id).await;
        set_bare(&mut connection, id).await;
    }
    let minute = Duration::from_secs(60);
    let (here, there): (Shops, Shops) = (
        Builder::new("far").local(1000, minute).remote(remote()).build(),
        Builder::new("far").local(1000, minute).remote(remote()).build(),
    );
    tokio::time::sleep(Duration::from_millis(300)).await;

    let mut times: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for at in 0..LOCAL {
            std::hint::black_box(bare.get(&u64::from(at % 1000)));
        }
        times[0].push(each(started, LOCAL));
        let started = Instant::now();
        for at in 0..LOCAL {
            std::hint::black_box(get(&local, u64::from(at % 1000)).await);
        }
        times[1].push(each(started, LOCAL));
        let started = Instant::now();
        for at in 0..REMOTE {
            std::hint::black_box(get_bare(&mut connection, u64::from(at % 100)).await);
        }
        times[2].push(each(started, REMOTE));
        let started = Instant::now();
        for at in 0..REMOTE {
            std::hint::black_box(get(&behind, u64::from(at % 100)).await);
        }
        times[3].push(each(started, REMOTE));
        times[4].push(seen_elsewhere(&here, &there).await);
    }
    let loads = behind.stats().loads;
    assert_eq!(loads, 100, "every hit came from Redis");
    let [bare, local, bare_remote, behind, seen] = times.map(fastest_tenth);
    let (local_ratio, remote_ratio) = (bare / local, bare_remote / behind);
    println!("bare moka get            {:>10.3} µs", bare);
    println!("hit in the process       {:>10.3} µs  {:.2} of it (bar {LOCAL_BAR})", local, local_ratio);
    println!("bare GET and decode      {:>10.3} µs", bare_remote);
    println!("hit in Redis             {:>10.3} µs  {:.2} of it (bar {REMOTE_BAR})", behind, remote_ratio);
    println!("a change seen elsewhere  {seen:>10.3} µs  after invalidate has returned, at most");
    if local_ratio < LOCAL_BAR || remote_ratio < REMOTE_BAR {
        println!("below the bar");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

async fn set_bare(connection: &mut MultiplexedConnection, id: u64) {
    let json = serde_json::to_vec(&shop(id)).expect("JSON");
    let mut set = redis::cmd("SET");
    set.arg(format!("bare:{id}")).arg(json);
    set.query_async::<()>(connection).await.expect("an answer");
}

async fn get_bare(connection: &mut MultiplexedConnection, id: u64) -> Shop {
    let mut get = redis::cmd("GET");
    get.arg(format!("bare:{id}"));
    let json: Vec<u8> = get.query_async(connection).await.expect("an answer");
    serde_json::from_slice(&json).expect("a shop")
}

/// From the return of `invalidate` here until the other node does not have the value any more: the mean, in µs.
async fn seen_elsewhere(here: &Shops, there: &Shops) -> f64 {
    let mut total = Duration::ZERO;
    for _ in 0..CHANGES {
        get(there, 1).await;
        let before = there.stats().local_hits;
        here.invalidate(&1).await;
        let started = Instant::now();
        let mut asked = before;
        loop {
            get(there, 1).await;
            let hits = there.stats().local_hits;
            if hits == asked {
                break;
            }
            asked = hits;
        }
        total += started.elapsed();
    }
    total.as_secs_f64() * 1e6 / f64::from(CHANGES)
}

fn each(started: Instant, times: u32) -> f64 {
    started.elapsed().as_secs_f64() * 1e6 / f64::from(times)
}

fn fastest_tenth(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 10]
}
