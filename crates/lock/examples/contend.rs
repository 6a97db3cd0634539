//! Many tasks increment a counter by reading it and writing it back, which loses increments without mutual exclusion. Run it in several
//! terminals at once:
//!
//! ```sh
//! cargo run -p stampede-lock --example contend -- fair counter 64 10 redis://127.0.0.1/
//! ```
//!
//! Arguments: the kind (none, simple, reentrant, fair, read-write, multi or redlock), the name of the lock, the number of tasks, the
//! increments per task, and the servers (redlock needs three or more). It fails if a reader sees a partial write; lost increments show in
//! the counter.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Guard, Lock, Locks, MultiLock, MultiLockGuard, Owner, RedLock, RedLockGuard};

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, name, tasks, rounds, urls @ ..] = &*args else { bail!("kind name tasks rounds url…") };
    let (tasks, rounds): (usize, usize) = (tasks.parse()?, rounds.parse()?);
    let mut servers = Vec::new();
    for url in urls {
        servers.push(Locks::connect(url.as_str(), config()?).await?);
    }
    let data = redis::Client::open(urls.first().context("a server")?.as_str())?;
    let data = data.get_multiplexed_async_connection().await?;
    let mut running = Vec::new();
    for task in 0..tasks {
        let work = Work { kind: kind.clone(), name: name.clone(), servers: servers.clone(), data: data.clone() };
        running.push(tokio::spawn(async move { work.run(task, rounds).await }));
    }
    for task in running {
        task.await??;
    }
    // A Redlock is released on the majority; the other servers are released in the background.
    for server in &servers {
        server.close().await?;
    }
    Ok(())
}

/// The environment variable `TTL_MS` sets a shorter TTL.
fn config() -> Result<Config> {
    let mut config = Config::default();
    if let Ok(ttl) = std::env::var("TTL_MS") {
        config.watchdog_ttl = Duration::from_millis(ttl.parse()?);
    }
    Ok(config)
}

struct Work {
    kind: String,
    name: String,
    servers: Vec<Locks>,
    data: MultiplexedConnection,
}

impl Work {
    async fn run(mut self, task: usize, rounds: usize) -> Result<()> {
        for _ in 0..rounds {
            if self.kind == "read-write" && task % 2 == 1 {
                self.read().await?;
            } else {
                self.increment().await?;
            }
        }
        Ok(())
    }

    async fn increment(&mut self) -> Result<()> {
        let guard = self.acquire().await?;
        let (first, second) = (format!("{}-count", self.name), format!("{}-again", self.name));
        let count: u64 = self.data.get::<_, Option<u64>>(&first).await?.unwrap_or(0);
        tokio::task::yield_now().await;
        let _: () = self.data.set(&first, count + 1).await?;
        let _: () = self.data.set(&second, count + 1).await?;
        Ok(guard.release().await?)
    }

    async fn read(&mut self) -> Result<()> {
        let lock = self.servers[0].read_write(&self.name, &Owner::new())?;
        let guard = lock.read().lock().await?;
        let first: Option<u64> = self.data.get(format!("{}-count", self.name)).await?;
        let second: Option<u64> = self.data.get(format!("{}-again", self.name)).await?;
        ensure!(first == second, "a reader saw {first:?} and {second:?}");
        Ok(guard.release().await?)
    }

    async fn acquire(&self) -> Result<AnyGuard> {
        let (first, name, owner) = (&self.servers[0], &self.name, Owner::new());
        Ok(match &*self.kind {
            "none" => AnyGuard::None,
            "simple" => AnyGuard::One(first.simple(name)?.lock().await?),
            "reentrant" => twice(&first.reentrant(name, &owner)?).await?,
            "fair" => twice(&first.fair(name, &owner)?).await?,
            "read-write" => twice(first.read_write(name, &owner)?.write()).await?,
            "multi" => {
                let on = |(index, server): (usize, &Locks)| server.reentrant(&format!("{name}-{index}"), &owner);
                let mut locks: Vec<Lock> = self.servers.iter().enumerate().map(on).collect::<Result<_, _>>()?;
                locks.push(first.reentrant(&format!("{name}-more"), &owner)?);
                // In random order.
                let offset = rand::random_range(0..locks.len());
                locks.rotate_left(offset);
                AnyGuard::Multi(MultiLock::new(locks)?.lock().await?)
            }
            "redlock" => AnyGuard::RedLock(RedLock::new(&self.servers, name)?.lock().await?),
            other => bail!("there is no {other} lock"),
        })
    }
}

/// Enters a re-entrant lock twice.
async fn twice(lock: &Lock) -> Result<AnyGuard> {
    Ok(AnyGuard::Twice(lock.lock().await?, lock.try_lock().await?))
}

enum AnyGuard {
    None,
    One(Guard),
    Twice(Guard, Guard),
    Multi(MultiLockGuard),
    RedLock(RedLockGuard),
}

impl AnyGuard {
    async fn release(self) -> stampede_lock::Result<()> {
        match self {
            Self::None => Ok(()),
            Self::One(guard) => guard.release().await,
            Self::Twice(outer, inner) => {
                inner.release().await?;
                outer.release().await
            }
            Self::Multi(guard) => guard.release().await,
            Self::RedLock(guard) => guard.release().await,
        }
    }
}
