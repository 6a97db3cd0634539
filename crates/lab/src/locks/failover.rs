//! A master that is lost before its replica has the lock. Replication is asynchronous, so Redis has confirmed the lock by then.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use stampede_lock::{Config, Locks};
use stampede_proof::servers::redis::{client, start_with, url};
use stampede_proof::servers::{Server, run};

use crate::error::{Error, Result};
use crate::measured::{Flaw, Measured};
use crate::meter::calls;

const NOT_PERSISTENT: &[&str] = &["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"];
/// A port where nothing listens.
const NOWHERE: &str = "1";
/// How often the lock is acquired and released before the fail-over, and for how long at most.
const LOADS: u64 = 500;
const LOAD_TIMEOUT: Duration = Duration::from_secs(3);

/// Independent masters; the first has a replica.
#[derive(Debug)]
pub struct Masters {
    masters: Vec<Server>,
    replica: Server,
}

impl Masters {
    /// # Errors
    /// If a server does not start.
    pub async fn start(count: usize) -> Result<Self> {
        let start = move || -> std::io::Result<Self> {
            let masters = (0..count).map(|_| start_with(NOT_PERSISTENT)).collect::<std::io::Result<Vec<_>>>()?;
            let replica = start_with(NOT_PERSISTENT)?;
            let port = masters.first().map(Server::port).unwrap_or_default().to_string();
            ask(&replica, &["replicaof", "127.0.0.1", &port])?;
            Ok(Self { masters, replica })
        };
        Ok(tokio::task::spawn_blocking(start).await.map_err(|error| Error::Failed(error.to_string()))??)
    }

    /// A client for each master.
    ///
    /// # Errors
    /// If one does not answer.
    pub async fn connect(&self) -> Result<Vec<Locks>> {
        connect(self.masters.iter()).await
    }

    /// Acquires and releases a lock one time after another, and counts the commands of all masters.
    ///
    /// # Errors
    /// That of the lock, or of a master that does not answer.
    #[expect(clippy::cast_precision_loss, reason = "counts of one run")]
    pub async fn load<F>(&self, measured: &mut Measured, lock_and_release: impl Fn() -> F + Send) -> Result<()>
    where
        F: Future<Output = Result<(), stampede_lock::Error>> + Send,
    {
        let mut latencies = Histogram::<u64>::new(3).map_err(|error| Error::Failed(error.to_string()))?;
        let (before, begin) = (self.commands()?, Instant::now());
        while latencies.len() < LOADS && begin.elapsed() < LOAD_TIMEOUT {
            let sent = Instant::now();
            lock_and_release().await?;
            latencies.saturating_record(u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX));
        }
        measured.requests = latencies.len();
        measured.orders_per_s = Some(latencies.len() as f64 / begin.elapsed().as_secs_f64());
        measured.p99_ms = Some(latencies.value_at_quantile(0.99) as f64 / 1000.0);
        measured.redis_per_request = Some((self.commands()? - before) as f64 / latencies.len() as f64);
        Ok(())
    }

    /// The commands that the masters have executed so far.
    fn commands(&self) -> Result<u64> {
        let of = |server| Ok(calls(&run(client(Server::port(server)).args(["info", "commandstats"]))?));
        self.masters.iter().map(of).sum()
    }

    /// The replica is cut off from its master.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn cut_replication(&self) -> Result<()> {
        Ok(ask(&self.replica, &["replicaof", "127.0.0.1", NOWHERE])?)
    }

    /// The first master dies and its replica takes over. Returns a client for each master as it is now.
    ///
    /// # Errors
    /// If the replica does not answer.
    pub async fn fail_over(&self) -> Result<Vec<Locks>> {
        let (first, others) = self.masters.split_first().ok_or(Error::TimedOut("a master"))?;
        first.kill()?;
        ask(&self.replica, &["replicaof", "no", "one"])?;
        connect([&self.replica].into_iter().chain(others)).await
    }
}

/// A guard if the lock was acquired, `None` if another owner holds it. Any other error says nothing about the lock.
///
/// # Errors
/// That error.
pub fn acquired<G>(tried: Result<G, stampede_lock::Error>) -> Result<Option<G>> {
    match tried {
        Ok(guard) => Ok(Some(guard)),
        Err(stampede_lock::Error::NotAcquired { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Judges who holds the lock after the fail-over: whether it is still valid for the node that had it, and whether another one has got it.
///
/// # Errors
/// If it is not valid any more for the first node. Then the other one proves nothing.
pub fn judge(measured: &mut Measured, first_valid: bool, second: bool) -> Result<()> {
    if !first_valid {
        return Err(Error::TimedOut("the fail-over within the lease of the first node"));
    }
    let seen = |_| "two nodes held the lock at once after the fail-over".to_owned();
    measured.count(Flaw::Duplicated, second.into(), seen);
    Ok(())
}

/// Notes if the lock is not free although its holder has released it.
pub fn judge_released(measured: &mut Measured, free: bool) {
    let stuck = u64::from(!free);
    measured.count(Flaw::Leaked, stuck, |_| "the lock is still taken after its release".to_owned());
}

fn ask(server: &Server, command: &[&str]) -> std::io::Result<()> {
    run(client(server.port()).args(command)).map(drop)
}

async fn connect(servers: impl Iterator<Item = &Server> + Send) -> Result<Vec<Locks>> {
    let mut locks = Vec::new();
    for server in servers {
        locks.push(Locks::connect(url(server.port()), Config::default()).await?);
    }
    Ok(locks)
}
