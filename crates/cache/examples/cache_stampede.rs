//! Many callers request one key at the same time from a slow source that counts its calls. Start several processes at once:
//!
//! ```sh
//! cargo run -p stampede-cache --example cache_stampede -- redis://127.0.0.1/ cold 2500 1500
//! ```
//!
//! Arguments: the URL of Redis; `cold` or `stale` (the value is cached but stale); the number of callers; the duration of a load in
//! milliseconds. The callers start when the key `go` exists. The program then prints the longest wait in milliseconds. Every load appends
//! its process id to the list `loads`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use stampede_cache::{Builder, Cache, Remote, RemoteConfig};

#[tokio::main]
#[expect(clippy::print_stdout, reason = "the output of the example")]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [url, mode, callers, load_ms] = &*args else { bail!("usage: URL cold|stale CALLERS LOAD_MS") };
    let (callers, load_time) = (callers.parse::<usize>()?, Duration::from_millis(load_ms.parse()?));
    let config = RemoteConfig { response_timeout: Duration::from_secs(5), ..RemoteConfig::default() };
    let remote = Remote::new("stampede", url.as_str(), config)?;
    let mut source = redis::Client::open(url.as_str())?.get_multiplexed_async_connection().await?;
    let cache: Cache<u64, String, redis::RedisError> = Builder::new("stampede")
        .refresh_after(Duration::from_secs(1))
        .wait_timeout(Duration::from_secs(20))
        .remote(remote)
        .build();
    // Only one process puts the value: puts that overlap invalidate the key.
    if mode == "stale" && source.set_nx("prepared", std::process::id()).await? {
        cache.put(&1, async { anyhow::Ok(Some("old".to_owned())) }).await?;
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    println!("ready");
    while source.exists::<_, u64>("go").await? == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let requests = (0..callers).map(|_| {
        let (cache, source) = (cache.clone(), source.clone());
        tokio::spawn(async move {
            let started = Instant::now();
            let value = cache.get_or_load(&1, move || load(source, load_time)).await?.context("a value")?;
            anyhow::Ok((value, started.elapsed()))
        })
    });
    let requests: Vec<_> = requests.collect();
    let mut longest = Duration::ZERO;
    for request in requests {
        let (value, waited) = request.await??;
        ensure!(*value == if mode == "stale" { "old" } else { "new" }, "{value}");
        longest = longest.max(waited);
    }
    println!("longest {}", longest.as_millis());
    // One of the processes refreshes the stale value.
    let current = async || {
        let source = source.clone();
        anyhow::Ok(cache.get_or_load(&1, move || load(source, load_time)).await?)
    };
    while current().await?.is_none_or(|value| *value != "new") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("new");
    cache.drain().await;
    Ok(())
}

/// A slow load that counts its calls.
async fn load(mut source: MultiplexedConnection, load_time: Duration) -> Result<Option<String>, redis::RedisError> {
    let _: u64 = source.rpush("loads", std::process::id()).await?;
    tokio::time::sleep(load_time).await;
    Ok(Some("new".to_owned()))
}
