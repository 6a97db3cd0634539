//! Writes a value under a lock again and again, with its fencing token, and does not look whether it still holds the lock: the value
//! does. Stop it for longer than its lease (`kill -STOP`), write with another one meanwhile, and let it go on: it is refused.
//!
//! ```sh
//! cargo run -p stampede-lock --example fenced_writer -- redis://127.0.0.1/ 1000
//! ```
//!
//! The arguments: the server; the lease in milliseconds, renewed while the process runs.

use std::time::Duration;

use anyhow::{Context as _, Result};
use stampede_lock::{Config, Locks, Owner};

/// KEYS the value; ARGV token, value. Returns 1 written, 0 refused.
const WRITE: &str = "
    if tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'value', ARGV[2])
    return 1";

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example talks to the one who runs it")]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let url = args.next().context("the URL of a Redis")?;
    let lease = Duration::from_millis(args.next().context("the lease in milliseconds")?.parse()?);
    let config = Config { watchdog_lease: lease, ..Config::default() };
    let locks = Locks::connect(url.as_str(), config).await?;
    // It may be stopped in the middle of a question; that is no reason to give up.
    let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let mut data = redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&patient).await?;

    let guard = locks.reentrant("value", &Owner::new())?.lock().await?;
    let fence = guard.fence().context("a token")?;
    println!("held {fence}");
    let mut pause = tokio::time::interval(Duration::from_millis(10));
    loop {
        pause.tick().await;
        let write = redis::cmd("EVAL").arg(WRITE).arg(1).arg("value").arg(fence).arg("mine").to_owned();
        let written: i64 = write.query_async(&mut data).await?;
        if written == 0 {
            break;
        }
    }
    println!("refused");
    guard.lost().await;
    println!("release: {}", guard.release().await.err().context("not the holder any more")?);
    Ok(())
}
