//! What one run of a version uses: fresh tables, an empty Redis, and the race to provoke.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, MySqlPool};
use stampede_proof::servers::{mariadb, rabbitmq};

use crate::error::{Error, Result};
use crate::kill::KillPoint;
use crate::meter::CountedRedis;
use crate::race::RacePoint;
use crate::servers::{ServerKind, Servers};

/// Connections of a node to the database.
const POOL: u32 = 32;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(20);
const REDIS_TIMEOUT: Duration = Duration::from_secs(10);

const TABLES: &[&str] = &[
    "CREATE TABLE voucher (id BIGINT PRIMARY KEY, stock INT NOT NULL, version INT NOT NULL)",
    "CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, user_id BIGINT NOT NULL, KEY (user_id))",
];

/// The one voucher that is sold.
pub const VOUCHER: i64 = 1;

#[derive(Debug, Clone)]
pub struct Site {
    pub stock: u64,
    /// Between the check and the write.
    pub race: RacePoint,
    /// Before an order that the database rejected is rolled back in Redis, and before that is tried again.
    pub before_roll_back: RacePoint,
    pub before_retry: RacePoint,
    /// Where a node is killed: before it writes an order that was admitted, after an order is committed and before the queue knows, and after
    /// a buyer is admitted and before their order is published.
    pub kill: KillPoint,
    pub kill_after_commit: KillPoint,
    pub kill_before_publish: KillPoint,
    db: Option<MySqlPool>,
    redis: Option<(redis::Client, CountedRedis)>,
    rabbitmq: Option<String>,
    /// The name of the queue in RabbitMQ.
    pub queue: String,
}

impl Site {
    /// Creates the tables with this stock and deletes all keys of Redis, as far as the version needs them.
    pub(crate) async fn create(
        servers: &Servers,
        needs: &[ServerKind],
        name: &str,
        stock: u64,
        race: RacePoint,
    ) -> Result<Self> {
        let (before_roll_back, before_retry) = (RacePoint::open(), RacePoint::open());
        let mut site = Self {
            stock,
            race,
            before_roll_back,
            before_retry,
            kill: KillPoint::never(),
            kill_after_commit: KillPoint::never(),
            kill_before_publish: KillPoint::never(),
            db: None,
            redis: None,
            rabbitmq: None,
            queue: String::new(),
        };
        for kind in needs {
            match kind {
                ServerKind::MariaDb => site.db = Some(create_tables(servers, name, stock).await?),
                ServerKind::Redis => {
                    let server = servers.redis()?;
                    redis::cmd("FLUSHALL").exec_async(&mut server.admin.clone()).await?;
                    let connection = connect(&server.client).await?;
                    let sent = Arc::new(AtomicU64::new(0));
                    site.redis = Some((server.client.clone(), CountedRedis::new(connection, sent)));
                }
                ServerKind::RabbitMq => {
                    site.rabbitmq = Some(rabbitmq::url(servers.rabbitmq()?.port()));
                    name.clone_into(&mut site.queue);
                }
            }
        }
        Ok(site)
    }

    /// The database.
    ///
    /// # Errors
    /// If the version does not list MariaDB among what it needs.
    pub fn db(&self) -> Result<MySqlPool> {
        self.db.clone().ok_or_else(|| Error::Failed("the version does not need MariaDB".to_owned()))
    }

    /// The connection to Redis that all tasks of a node share.
    ///
    /// # Errors
    /// If the version does not list Redis among what it needs.
    pub fn redis(&self) -> Result<CountedRedis> {
        let (_, connection) = self.redis.as_ref().ok_or_else(no_redis)?;
        Ok(connection.clone())
    }

    /// Makes other connections to Redis, for commands that block and for subscriptions.
    ///
    /// # Errors
    /// As [`redis`](Self::redis).
    pub fn redis_client(&self) -> Result<redis::Client> {
        let (client, _) = self.redis.as_ref().ok_or_else(no_redis)?;
        Ok(client.clone())
    }

    /// The URL of Redis, for crates that connect by themselves.
    ///
    /// # Errors
    /// As [`redis`](Self::redis).
    pub fn redis_url(&self) -> Result<String> {
        Ok(format!("redis://{}/", self.redis_client()?.get_connection_info().addr()))
    }

    /// A connection to RabbitMQ.
    ///
    /// # Errors
    /// If the version does not list RabbitMQ among what it needs, or it does not answer.
    pub async fn rabbitmq(&self) -> Result<lapin::Connection> {
        let url =
            self.rabbitmq.as_ref().ok_or_else(|| Error::Failed("the version does not need RabbitMQ".to_owned()))?;
        Ok(lapin::Connection::connect(url, lapin::ConnectionProperties::default()).await?)
    }

    /// Closes the connections to the database, of which the server has a limited number.
    pub(crate) async fn close(self) {
        if let Some(db) = self.db {
            db.close().await;
        }
    }
}

/// A connection that waits for replies longer than the busiest machine needs.
pub async fn connect(client: &redis::Client) -> Result<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(REDIS_TIMEOUT))
        .set_response_timeout(Some(REDIS_TIMEOUT));
    Ok(client.get_multiplexed_async_connection_with_config(&config).await?)
}

fn no_redis() -> Error {
    Error::Failed("the version does not need Redis".to_owned())
}

async fn create_tables(servers: &Servers, name: &str, stock: u64) -> Result<MySqlPool> {
    let server = servers.mariadb()?;
    sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&server.admin).await?;
    let pool = MySqlPoolOptions::new()
        .max_connections(POOL)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // A ping with every statement would distort the figures.
        .test_before_acquire(false)
        .connect(&mariadb::url(server.server.port(), name))
        .await?;
    for table in TABLES {
        sqlx::query(*table).execute(&pool).await?;
    }
    sqlx::query("INSERT INTO voucher VALUES (?, ?, 0)").bind(VOUCHER).bind(stock).execute(&pool).await?;
    // Connected before anything is measured.
    let connections = futures_util::future::try_join_all((0..POOL).map(|_| pool.acquire())).await?;
    drop(connections);
    Ok(pool)
}
