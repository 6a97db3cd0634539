//! The private servers. Those that are needed are started before the first version runs, so that no start distorts a measurement.

use std::io::ErrorKind;
use std::sync::Arc;

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use serde::Serialize;
use sqlx::MySqlPool;
use sqlx::mysql::MySqlPoolOptions;
use stampede_proof::servers::{Server, mariadb, rabbitmq, redis as redis_server};
use tokio::sync::OnceCell;

use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerKind {
    MariaDb,
    Redis,
    RabbitMq,
}

impl ServerKind {
    pub const ALL: &[Self] = &[Self::MariaDb, Self::Redis, Self::RabbitMq];

    pub const fn name(self) -> &'static str {
        match self {
            Self::MariaDb => "MariaDB",
            Self::Redis => "Redis",
            Self::RabbitMq => "RabbitMQ",
        }
    }

    /// The package of Debian and Ubuntu.
    pub const fn package(self) -> &'static str {
        match self {
            Self::MariaDb => "mariadb-server",
            Self::Redis => "redis-server",
            Self::RabbitMq => "rabbitmq-server",
        }
    }
}

/// Why the versions that need a server cannot run.
#[derive(Debug)]
pub enum StartError {
    NotInstalled(ServerKind),
    Other(Error),
}

impl From<Error> for StartError {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

#[derive(Debug)]
pub struct MariaDb {
    pub server: Arc<Server>,
    /// For creating databases and reading counters.
    pub admin: MySqlPool,
}

#[derive(Debug, Clone)]
pub struct Redis {
    pub server: Arc<Server>,
    pub client: redis::Client,
    /// For clearing the keys and reading counters.
    pub admin: MultiplexedConnection,
}

#[derive(Debug, Default)]
pub struct Servers {
    mariadb: OnceCell<MariaDb>,
    redis: OnceCell<Redis>,
    rabbitmq: OnceCell<Arc<Server>>,
}

impl Servers {
    /// Starts a server unless it runs.
    pub async fn start(&self, kind: ServerKind) -> Result<(), StartError> {
        match kind {
            ServerKind::MariaDb => self.mariadb.get_or_try_init(start_mariadb).await.map(drop),
            ServerKind::Redis => self.redis.get_or_try_init(start_redis).await.map(drop),
            ServerKind::RabbitMq => self.rabbitmq.get_or_try_init(start_rabbitmq).await.map(drop),
        }
    }

    /// Starts these servers side by side.
    pub async fn start_all(&self, kinds: impl IntoIterator<Item = ServerKind>) {
        // An error shows when a version needs the server, which then tries again.
        join_all(kinds.into_iter().map(|kind| self.start(kind))).await;
    }

    /// Makes RabbitMQ write its log of definitions to disk.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn sync_rabbitmq(&self) -> Result<()> {
        let server = self.rabbitmq()?;
        let sync = move || rabbitmq::control(&server, &["eval", "mnesia:sync_log()."]);
        let synced = tokio::task::spawn_blocking(sync).await.map_err(|error| Error::Failed(error.to_string()))??;
        if synced.trim() == "ok" { Ok(()) } else { Err(Error::Failed(format!("RabbitMQ: {synced}"))) }
    }

    /// Kills RabbitMQ and starts it again on the same data.
    ///
    /// # Errors
    /// If it does not start.
    pub async fn kill_rabbitmq(&self) -> Result<()> {
        let server = self.rabbitmq()?;
        let restarted = tokio::task::spawn_blocking(move || server.kill().and_then(|()| server.restart())).await;
        Ok(restarted.map_err(|error| Error::Failed(error.to_string()))??)
    }

    /// # Errors
    /// If it was not started: the version does not list it among what it needs.
    pub fn mariadb(&self) -> Result<&MariaDb> {
        self.mariadb.get().ok_or_else(|| not_started(ServerKind::MariaDb))
    }

    /// # Errors
    /// As [`mariadb`](Self::mariadb).
    pub fn redis(&self) -> Result<&Redis> {
        self.redis.get().ok_or_else(|| not_started(ServerKind::Redis))
    }

    /// # Errors
    /// As [`mariadb`](Self::mariadb).
    pub fn rabbitmq(&self) -> Result<Arc<Server>> {
        self.rabbitmq.get().cloned().ok_or_else(|| not_started(ServerKind::RabbitMq))
    }
}

fn not_started(kind: ServerKind) -> Error {
    Error::Failed(format!("{} was not started", kind.name()))
}

async fn start_mariadb() -> Result<MariaDb, StartError> {
    let server = launch(ServerKind::MariaDb, mariadb::start).await?;
    let url = mariadb::url(server.port(), "mysql");
    let admin = MySqlPoolOptions::new().max_connections(1).connect(&url).await.map_err(Error::from)?;
    Ok(MariaDb { server: Arc::new(server), admin })
}

async fn start_redis() -> Result<Redis, StartError> {
    let server = launch(ServerKind::Redis, redis_server::start).await?;
    let client = redis::Client::open(redis_server::url(server.port())).map_err(Error::from)?;
    let admin = crate::site::connect(&client).await?;
    Ok(Redis { server: Arc::new(server), client, admin })
}

async fn start_rabbitmq() -> Result<Arc<Server>, StartError> {
    launch(ServerKind::RabbitMq, rabbitmq::start).await.map(Arc::new)
}

/// Runs a blocking start on a thread of its own.
async fn launch(
    kind: ServerKind,
    start: impl FnOnce() -> std::io::Result<Server> + Send + 'static,
) -> Result<Server, StartError> {
    let started = tokio::task::spawn_blocking(start).await;
    let started = started.map_err(|error| Error::Failed(error.to_string()))?;
    started.map_err(|error| match error.kind() {
        ErrorKind::NotFound => StartError::NotInstalled(kind),
        _ => StartError::Other(error.into()),
    })
}
