//! The cost of a hit compared with the plain operation, and the time until a change is visible on another node, on a private Redis:
//!
//! ```sh
//! cargo bench -p stampede-cache
//! ```
//!
//! The measurements alternate in many short rounds, and the 10th percentile of the rounds is reported, because slower rounds mostly measure
//! other load on the machine. Exits with 1 if a ratio is below its minimum.

use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use stampede_cache::{Builder, Cache, Remote, RemoteConfig};
use stampede_testkit::redis as server;

/// The minimum of (plain moka get / local hit). A second lookup per hit would fall below it.
const MIN_LOCAL_RATIO: f64 = 0.5;
/// The minimum of (plain `GET` and decode / Redis hit). A second round trip per hit would fall below it; noise of a busy machine does not.
const MIN_REMOTE_RATIO: f64 = 0.65;
const ROUNDS: usize = 100;
const LOCAL_GETS: u32 = 20_000;
const REMOTE_GETS: u32 = 300;
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
#[expect(clippy::print_stdout, reason = "the output of the benchmark")]
async fn main() -> ExitCode {
    let redis = server::start().expect("a private Redis");
    let url = server::url(redis.port());
    let remote = || Remote::new("bench", &*url, RemoteConfig::default()).expect("an address");
    let local: Shops = Builder::new("local").build();
    let plain: moka::sync::Cache<u64, Arc<Shop>> = moka::sync::Cache::new(10_000);
    for id in 0..1000 {
        get(&local, id).await;
        plain.insert(id, Arc::new(shop(id)));
    }
    // No local level: every get reads Redis.
    let remote_only: Shops = Builder::new("remote_only").local(0, Duration::ZERO).remote(remote()).build();
    let connection = redis::Client::open(&*url).expect("a URL").get_multiplexed_async_connection().await;
    let mut connection = connection.expect("a connection");
    for id in 0..100 {
        get(&remote_only, id).await;
        set_plain(&mut connection, id).await;
    }
    let minute = Duration::from_secs(60);
    let (writer, reader): (Shops, Shops) = (
        Builder::new("nodes").local(1000, minute).remote(remote()).build(),
        Builder::new("nodes").local(1000, minute).remote(remote()).build(),
    );
    tokio::time::sleep(Duration::from_millis(300)).await;

    let mut times: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for at in 0..LOCAL_GETS {
            std::hint::black_box(plain.get(&u64::from(at % 1000)));
        }
        times[0].push(time_per_call(started, LOCAL_GETS));
        let started = Instant::now();
        for at in 0..LOCAL_GETS {
            std::hint::black_box(get(&local, u64::from(at % 1000)).await);
        }
        times[1].push(time_per_call(started, LOCAL_GETS));
        let started = Instant::now();
        for at in 0..REMOTE_GETS {
            std::hint::black_box(get_plain(&mut connection, u64::from(at % 100)).await);
        }
        times[2].push(time_per_call(started, REMOTE_GETS));
        let started = Instant::now();
        for at in 0..REMOTE_GETS {
            std::hint::black_box(get(&remote_only, u64::from(at % 100)).await);
        }
        times[3].push(time_per_call(started, REMOTE_GETS));
        times[4].push(time_until_visible(&writer, &reader).await);
    }
    let loads = remote_only.stats().loads;
    assert_eq!(loads, 100, "every later get is a hit in Redis");
    let [plain, local, plain_remote, remote, visible] = times.map(tenth_percentile);
    let (local_ratio, remote_ratio) = (plain / local, plain_remote / remote);
    println!("plain moka get            {:>10.3} µs", plain);
    println!("local hit                 {:>10.3} µs  ratio {:.2} (minimum {MIN_LOCAL_RATIO})", local, local_ratio);
    println!("plain GET and decode      {:>10.3} µs", plain_remote);
    println!("Redis hit                 {:>10.3} µs  ratio {:.2} (minimum {MIN_REMOTE_RATIO})", remote, remote_ratio);
    println!("visible on another node   {visible:>10.3} µs  after invalidate has returned");
    if local_ratio < MIN_LOCAL_RATIO || remote_ratio < MIN_REMOTE_RATIO {
        println!("a ratio is below its minimum");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

async fn set_plain(connection: &mut MultiplexedConnection, id: u64) {
    let json = serde_json::to_vec(&shop(id)).expect("JSON");
    let mut set = redis::cmd("SET");
    set.arg(format!("plain:{id}")).arg(json);
    set.query_async::<()>(connection).await.expect("an answer");
}

async fn get_plain(connection: &mut MultiplexedConnection, id: u64) -> Shop {
    let mut get = redis::cmd("GET");
    get.arg(format!("plain:{id}"));
    let json: Vec<u8> = get.query_async(connection).await.expect("an answer");
    serde_json::from_slice(&json).expect("a shop")
}

/// The mean time in µs from the return of `invalidate` on one node until the other node no longer has the value.
async fn time_until_visible(writer: &Shops, reader: &Shops) -> f64 {
    let mut total = Duration::ZERO;
    for _ in 0..CHANGES {
        get(reader, 1).await;
        let before = reader.stats().local_hits;
        writer.invalidate(&1).await;
        let started = Instant::now();
        let mut previous = before;
        loop {
            get(reader, 1).await;
            let hits = reader.stats().local_hits;
            if hits == previous {
                break;
            }
            previous = hits;
        }
        total += started.elapsed();
    }
    total.as_secs_f64() * 1e6 / f64::from(CHANGES)
}

fn time_per_call(started: Instant, times: u32) -> f64 {
    started.elapsed().as_secs_f64() * 1e6 / f64::from(times)
}

fn tenth_percentile(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 10]
}
