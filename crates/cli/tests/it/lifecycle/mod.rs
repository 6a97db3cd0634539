//! The steps of an order after it was bought, and edits of running sales, in every tier.

mod buy_again;
mod callbacks;
mod deadline;
mod due_together;
mod due_while_paid;
mod edits;
mod events;
mod history;
mod late;
mod paused_worker;
mod payments;
mod races;
mod refunds;
mod steps;

use std::path::PathBuf;

use stampede_core::SaleId;
use stampede_testkit::{Server, redis};

use crate::queued::rabbitmq::{BROKER, with_broker};
use crate::shop::{Kind, Shop, Storage, command};

/// A tier, as the setting names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierKind {
    Solo,
    Shared,
    Queued,
    /// With RabbitMQ as the queue.
    QueuedRabbitMq,
    Shielded,
}

/// Running nodes of a tier.
pub struct System {
    pub shops: Vec<Shop>,
    pub storages: Vec<Storage>,
    redis: Option<Server>,
    tier: TierKind,
    /// Environment variables of the nodes.
    environment: Vec<(&'static str, String)>,
    /// A file with settings.
    config: Option<PathBuf>,
}

impl System {
    /// Starts `count` nodes on one database. (Two processes cannot share SQLite.)
    pub fn start(kind: Kind, tier: TierKind, count: usize) -> Self {
        Self::start_with(kind, tier, count, Vec::new())
    }

    /// Starts nodes with these environment variables.
    pub fn start_with(kind: Kind, tier: TierKind, count: usize, environment: Vec<(&'static str, String)>) -> Self {
        Self::start_from(kind, tier, count, environment, None)
    }

    /// Starts nodes with these environment variables and this file with settings.
    pub fn start_from(
        kind: Kind,
        tier: TierKind,
        count: usize,
        environment: Vec<(&'static str, String)>,
        config: Option<PathBuf>,
    ) -> Self {
        let redis = (tier != TierKind::Solo).then(|| redis::start_durable().unwrap());
        let url = kind.server().map(|server| kind.create_database(server, server.port()));
        let storages: Vec<_> = (0..count).map(|_| Storage::with(url.clone())).collect();
        let mut system = Self { shops: Vec::new(), storages, redis, tier, environment, config };
        for n in 0..count {
            system.shops.push(system.run(n));
        }
        system
    }

    /// Starts the node `n`, which must not run.
    pub fn run(&self, n: usize) -> Shop {
        let mut command = command(&self.storages[n]);
        let name = match self.tier {
            TierKind::Solo => "solo",
            TierKind::Shared => "shared",
            TierKind::Queued | TierKind::QueuedRabbitMq => "queued",
            TierKind::Shielded => "shielded",
        };
        command.env("STAMPEDE__TIER", name);
        if self.tier == TierKind::QueuedRabbitMq {
            command = with_broker(BROKER.port())(command);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        if let Some(config) = &self.config {
            command.arg("--config").arg(config);
        }
        if let Some(redis) = &self.redis {
            command.args(["--redis", &redis::url(redis.port())]);
        }
        Shop::run(command)
    }

    pub async fn wait_for_sale(&self, sale: SaleId) {
        for shop in &self.shops {
            shop.wait_for_sale(sale).await;
        }
    }
}

/// Generates a test per tier and database for each `async fn test(kind: Kind, tier: TierKind)`; with `servers:` only on database servers,
/// which two processes can share in every tier; with `all:` also with RabbitMQ, and in `shielded` on the other database.
macro_rules! in_each_tier {
    (@module $module:ident, $kind:ident, $tier:ident, $($test:ident),*) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(crate::shop::Kind::$kind, crate::lifecycle::TierKind::$tier).await;
            })*
        }
    };
    ($($test:ident),*) => {
        in_each_tier!(@module solo_sqlite, Sqlite, Solo, $($test),*);
        in_each_tier!(servers: $($test),*);
    };
    (all: $($test:ident),*) => {
        in_each_tier!($($test),*);
        in_each_tier!(@module queued_rabbitmq, Postgres, QueuedRabbitMq, $($test),*);
        in_each_tier!(@module shielded_mariadb, MariaDb, Shielded, $($test),*);
    };
    (servers: $($test:ident),*) => {
        in_each_tier!(@module solo_mariadb, MariaDb, Solo, $($test),*);
        in_each_tier!(@module solo_postgres, Postgres, Solo, $($test),*);
        in_each_tier!(@module shared_mariadb, MariaDb, Shared, $($test),*);
        in_each_tier!(@module shared_postgres, Postgres, Shared, $($test),*);
        in_each_tier!(@module queued_mariadb, MariaDb, Queued, $($test),*);
        in_each_tier!(@module queued_postgres, Postgres, Queued, $($test),*);
        in_each_tier!(@module shielded_postgres, Postgres, Shielded, $($test),*);
    };
}
use in_each_tier;
