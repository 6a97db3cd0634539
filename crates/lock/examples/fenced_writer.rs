//! Writes a value under a lock again and again, with its fencing token, without checking whether it still holds the lock. Stop it for
//! longer than its TTL (`kill -STOP`), write with another instance meanwhile, and let it continue: its writes are refused.
//!
//! ```sh
//! cargo run -p stampede-lock --example fenced_writer -- redis://127.0.0.1/ 1000
//! ```
//!
//! Arguments: the server, and the TTL in milliseconds, which is renewed while the process runs.

use std::time::Duration;

use anyhow::{Context as _, Result};
use stampede_lock::{Config, Locks, Owner};

/// KEYS: the value. ARGV: token, value. Returns 1 if written, 0 if refused.
const WRITE: &str = "
    if tonumber(redis.call('HGET', KEYS[1], 'fence') or '0') > tonumber(ARGV[1]) then return 0 end
    redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'value', ARGV[2])
    return 1";

#[tokio::main]
#[expect(clippy::print_stdout, reason = "an example prints its results")]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let url = args.next().context("the URL of a Redis")?;
    let ttl = Duration::from_millis(args.next().context("the TTL in milliseconds")?.parse()?);
    let config = Config { watchdog_ttl: ttl, ..Config::default() };
    let locks = Locks::connect(url.as_str(), config).await?;
    // The process may be stopped while it waits for a reply, so there is no response timeout.
    let no_timeout = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let mut data = redis::Client::open(url)?.get_multiplexed_async_connection_with_config(&no_timeout).await?;

    let guard = locks.reentrant("value", &Owner::new())?.lock().await?;
    let token = guard.fencing_token().context("a token")?;
    println!("held {token}");
    let mut pause = tokio::time::interval(Duration::from_millis(10));
    loop {
        pause.tick().await;
        let write = redis::cmd("EVAL").arg(WRITE).arg(1).arg("value").arg(token).arg("mine").to_owned();
        let written: i64 = write.query_async(&mut data).await?;
        if written == 0 {
            break;
        }
    }
    println!("refused");
    guard.lost().await;
    println!("release: {}", guard.release().await.err().context("the lock is no longer held")?);
    Ok(())
}
