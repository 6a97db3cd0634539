//! Why a lease is not mutual exclusion, and how a fencing token makes up for it: a writer that sleeps through the end of its lease
//! believes that it still holds the lock, and the resource refuses it.
//!
//! ```sh
//! cargo run -p stampede-lock --example stale_writer -- redis://127.0.0.1/
//! ```

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Locks, Owner};

/// A value that remembers the highest token it has seen, and refuses lower ones. In SQL it would be
/// `UPDATE … SET value = ?, fence = ? WHERE id = ? AND fence <= ?`.
const WRITE: &str = "
    if tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'value', ARGV[2])
    return 1";

async fn write(data: &mut MultiplexedConnection, fence: u64, value: &str) -> Result<bool> {
    let written: i64 =
        redis::cmd("EVAL").arg(WRITE).arg(1).arg("value").arg(fence).arg(value).query_async(data).await?;
    Ok(written == 1)
}

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example talks to the one who runs it")]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).context("the URL of a Redis")?;
    let locks = Locks::connect(url.as_str(), Config::default()).await?;
    let mut data = redis::Client::open(url)?.get_multiplexed_async_connection().await?;

    let slow = locks.reentrant("value", &Owner::new())?.with_lease(Duration::from_millis(200))?.lock().await?;
    let slow_fence = slow.fence().context("a token")?;
    println!("the slow writer has the lock, token {slow_fence}, and falls asleep");
    slow.lost().await;

    let quick = locks.reentrant("value", &Owner::new())?.lock().await?;
    let quick_fence = quick.fence().context("a token")?;
    ensure!(write(&mut data, quick_fence, "quick").await?, "the holder may write");
    println!("the quick writer got the lock after the lease, token {quick_fence}, and wrote");

    ensure!(!write(&mut data, slow_fence, "slow").await?, "the stale writer must be refused");
    println!("the slow writer wakes up and writes with its token {slow_fence}: refused");
    println!("its release says: {}", slow.release().await.err().context("not the holder any more")?);
    quick.release().await?;
    Ok(())
}
