//! A master that is lost before its replica has the lock. Replication is asynchronous, so Redis has confirmed the lock by then.

use stampede_lock::{Config, Locks};
use stampede_proof::servers::redis::{client, start_with, url};
use stampede_proof::servers::{Server, run};

use crate::error::{Error, Result};

const NOT_PERSISTENT: &[&str] = &["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"];
/// A port where nothing listens.
const NOWHERE: &str = "1";

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
