//! Many tasks add to a counter by reading it and writing it back, which goes wrong unless they do it one at a time. Run it in several
//! terminals at once:
//!
//! ```sh
//! cargo run -p stampede-lock --example contend -- fair counter 64 10 redis://127.0.0.1/
//! ```
//!
//! The arguments: none, simple, reentrant, fair, read-write, multi or red; the lock's name; how many tasks; how often each adds; the servers
//! (red needs three or more). It ends with an error if readers saw a half-done write; that nothing was lost shows in the counter.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use redis::AsyncCommands as _;
use redis::aio::MultiplexedConnection;
use stampede_lock::{Config, Guard, Lock, Locks, Multi, MultiGuard, Owner, Red, RedGuard};

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
    // A red lock is released at the majority; the rest goes on in the background.
    for server in &servers {
        server.close().await?;
    }
    Ok(())
}

/// A shorter lease with the environment variable `LEASE_MS`.
fn config() -> Result<Config> {
    let mut config = Config::default();
    if let Ok(lease) = std::env::var("LEASE_MS") {
        config.watchdog_lease = Duration::from_millis(lease.parse()?);
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
                self.look().await?;
            } else {
                self.add().await?;
            }
        }
        Ok(())
    }

    async fn add(&mut self) -> Result<()> {
        let held = self.get().await?;
        let (first, second) = (format!("{}-count", self.name), format!("{}-again", self.name));
        let count: u64 = self.data.get::<_, Option<u64>>(&first).await?.unwrap_or(0);
        tokio::task::yield_now().await;
        let _: () = self.data.set(&first, count + 1).await?;
        let _: () = self.data.set(&second, count + 1).await?;
        Ok(held.release().await?)
    }

    async fn look(&mut self) -> Result<()> {
        let lock = self.servers[0].read_write(&self.name, &Owner::new())?;
        let guard = lock.read().lock().await?;
        let first: Option<u64> = self.data.get(format!("{}-count", self.name)).await?;
        let second: Option<u64> = self.data.get(format!("{}-again", self.name)).await?;
        ensure!(first == second, "a reader saw {first:?} and {second:?}");
        Ok(guard.release().await?)
    }

    async fn get(&self) -> Result<Held> {
        let (first, name, me) = (&self.servers[0], &self.name, Owner::new());
        Ok(match &*self.kind {
            "none" => Held::Nothing,
            "simple" => Held::One(first.simple(name)?.lock().await?),
            "reentrant" => twice(&first.reentrant(name, &me)?).await?,
            "fair" => twice(&first.fair(name, &me)?).await?,
            "read-write" => twice(first.read_write(name, &me)?.write()).await?,
            "multi" => {
                let on = |(at, server): (usize, &Locks)| server.reentrant(&format!("{name}-{at}"), &me);
                let mut locks: Vec<Lock> = self.servers.iter().enumerate().map(on).collect::<Result<_, _>>()?;
                locks.push(first.reentrant(&format!("{name}-more"), &me)?);
                // In any order.
                let turn = rand::random_range(0..locks.len());
                locks.rotate_left(turn);
                Held::Multi(Multi::new(locks)?.lock().await?)
            }
            "red" => Held::Red(Red::new(&self.servers, name)?.lock().await?),
            other => bail!("there is no {other} lock"),
        })
    }
}

/// Enters a re-entrant lock twice.
async fn twice(lock: &Lock) -> Result<Held> {
    Ok(Held::Twice(lock.lock().await?, lock.try_lock().await?))
}

enum Held {
    Nothing,
    One(Guard),
    Twice(Guard, Guard),
    Multi(MultiGuard),
    Red(RedGuard),
}

impl Held {
    async fn release(self) -> stampede_lock::Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::One(guard) => guard.release().await,
            Self::Twice(outer, inner) => {
                inner.release().await?;
                outer.release().await
            }
            Self::Multi(guard) => guard.release().await,
            Self::Red(guard) => guard.release().await,
        }
    }
}
