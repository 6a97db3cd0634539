//! Why a lease is not mutual exclusion, and how a fencing token helps: a writer that is suspended until its lease has expired assumes that
//! it still holds the lock, and the resource refuses its write.
//!
//! ```sh
//! cargo run -p stampede-lock --example stale_writer -- redis://127.0.0.1/
//! ```

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Locks, Owner};

/// Writes a value, unless a higher token was seen. In SQL it would be
/// `UPDATE … SET value = ?, fence = ? WHERE id = ? AND fence <= ?`.
const WRITE: &str = "
    if tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'value', ARGV[2])
    return 1";

async fn write(data: &mut MultiplexedConnection, token: u64, value: &str) -> Result<bool> {
    let written: i64 =
        redis::cmd("EVAL").arg(WRITE).arg(1).arg("value").arg(token).arg(value).query_async(data).await?;
    Ok(written == 1)
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example prints its results")]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).context("the URL of a Redis")?;
    let locks = Locks::connect(url.as_str(), Config::default()).await?;
    let mut data = redis::Client::open(url)?.get_multiplexed_async_connection().await?;

    let slow = locks.reentrant("value", &Owner::new())?.with_ttl(Duration::from_millis(200))?.lock().await?;
    let slow_token = slow.fencing_token().context("a token")?;
    println!("the slow writer holds the lock with token {slow_token} and is suspended");
    slow.lost().await;

    let quick = locks.reentrant("value", &Owner::new())?.lock().await?;
    let quick_token = quick.fencing_token().context("a token")?;
    ensure!(write(&mut data, quick_token, "quick").await?, "the holder may write");
    println!("the quick writer acquires the lock after the lease has expired, with token {quick_token}, and writes");

    ensure!(!write(&mut data, slow_token, "slow").await?, "the stale writer must be refused");
    println!("the slow writer resumes and writes with token {slow_token}: refused");
    println!("its release fails: {}", slow.release().await.err().context("the lock is no longer held")?);
    quick.release().await?;
    Ok(())
}
