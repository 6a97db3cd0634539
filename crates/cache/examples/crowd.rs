//! A crowd that wants one key at the same moment, from a source that is slow and counts its calls. Start it several times at once:
//!
//! ```sh
//! cargo run -p stampede-cache --example crowd -- redis://127.0.0.1/ cold 2500 1500
//! ```
//!
//! The arguments: the server; `cold` or `stale` (a value that has logically expired); how many callers want it; how many milliseconds the
//! source takes. It waits until the key `go` is there, and then prints the longest wait in milliseconds. The source writes down its
//! calls in the list `loads`, each with the number of its process.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use stampede_cache::{Builder, Cache, Remote, RemoteConfig};

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example talks to the one who runs it")]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, mode, crowd, takes] = &*args else { bail!("url, cold or stale, how many, and how long a load takes") };
    let (crowd, takes) = (crowd.parse::<usize>()?, Duration::from_millis(takes.parse()?));
    let config = RemoteConfig { answer_within: Duration::from_secs(5), ..RemoteConfig::default() };
    let remote = Remote::new("crowd", url.as_str(), config)?;
    let mut source = redis::Client::open(url.as_str())?.get_multiplexed_async_connection().await?;
    let cache: Cache<u64, String, redis::RedisError> = Builder::new("crowd")
        .refresh_after(Duration::from_secs(1))
        .wait_at_most(Duration::from_secs(20))
        .remote(remote)
        .build();
    if mode == "stale" {
        cache.put(&1, async { anyhow::Ok(Some("old".to_owned())) }).await?;
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    println!("ready");
    while source.exists::<_, u64>("go").await? == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let wants = (0..crowd).map(|_| {
        let (cache, source) = (cache.clone(), source.clone());
        tokio::spawn(async move {
            let started = Instant::now();
            let value = cache.get_or_load(&1, move || load(source, takes)).await?.context("a value")?;
            anyhow::Ok((value, started.elapsed()))
        })
    });
    let wants: Vec<_> = wants.collect();
    let mut longest = Duration::ZERO;
    for want in wants {
        let (value, waited) = want.await??;
        ensure!(*value == if mode == "stale" { "old" } else { "new" }, "{value}");
        longest = longest.max(waited);
    }
    println!("longest {}", longest.as_millis());
    // The stale one is refreshed, by one of the processes.
    let current = async || {
        let source = source.clone();
        anyhow::Ok(cache.get_or_load(&1, move || load(source, takes)).await?)
    };
    while current().await?.is_none_or(|value| *value != "new") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("new");
    cache.settled().await;
    Ok(())
}

/// Slow, and counts.
async fn load(mut source: MultiplexedConnection, takes: Duration) -> Result<Option<String>, redis::RedisError> {
    let _: u64 = source.rpush("loads", std::process::id()).await?;
    tokio::time::sleep(takes).await;
    Ok(Some("new".to_owned()))
}
