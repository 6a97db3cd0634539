//! End-to-end tests: the built binary, real sockets, a real database.
//!
//! - `shop`: a running server with buyers, and the verification of what they received; `cluster`: nodes of the tier `shared` with
//!   faulty surroundings
//! - `contract`: every response in any test is compared with the OpenAPI document; `fuzz`: hostile requests generated from it
//! - `storm`: many concurrent buyers; `crash`: the same with SIGKILL and aborts; `chaos`: random faults for `CHAOS_MINUTES`
//! - `nodes`: two processes on one database; `outage`: the database is killed, disconnected, slow; the disk is full
//! - `shared`: the tier `shared`, several processes with a gate in Redis; `shared_cache`: their caches; `shared_sessions`: their sessions; `shared_limits`: their rate
//!   limits; `recovery`: Redis, nodes, the database and clocks fail; `rebuild`: when the gate is rebuilt; `reduce`: stock is taken away; `redis_tls`: with TLS and a password; `ids`: ids from Redis
//! - `retirement`: sales that were over a day ago, in the tiers `shared` and `solo`
//! - `queued`: the tier `queued`, with a queue in front of the database; `shielded`: nodes refuse by themselves after the sell-out
//! - `quarantine`: orders that the database rejects; `lifecycle`: the steps of orders after they were bought and edits of running sales, in every tier
//! - `private_servers`: the servers that `bench` and `demo` start; `proof`: the load test, and that planted bugs are detected; `check`: `stampede check`
//! - `durability`: no confirmation before the write-ahead log is synced
//! - `administration`: roles, the audit log, trusted proxies, metrics; `credentials`: tokens, certificates, SIGHUP, the security log
//! - `attack`: one address opens as many connections as it can; `costly`: it sends the most expensive requests
//! - `edge`: TLS, CORS, slow senders; `hostile`: invalid input; `commands`: flags, settings, banner, shutdown; `buyers`: limits and orders
//! - `page`: the page for buyers in Chromium
//! - `receiver`: a server that gets signed messages; `statements`: how many statements a database server executes
//! - `webhook`: credentials in the webhook URL; `dependencies`: `make deps`
//! - `login`: codes, challenges, budgets; `login_attack`: guessing for minutes; `sessions`: sessions and accounts

#![expect(clippy::cast_possible_truncation, reason = "counts of a test are small")]

/// Generates one test per database for each `async fn test(kind: Kind)`; with `servers:` only for the database servers.
macro_rules! on_each_database {
    (@module $module:ident, $kind:ident, $($test:ident),*) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(crate::shop::Kind::$kind).await;
            })*
        }
    };
    (servers: $($test:ident),*) => {
        on_each_database!(@module mariadb, MariaDb, $($test),*);
        on_each_database!(@module postgres, Postgres, $($test),*);
    };
    ($($test:ident),*) => {
        on_each_database!(@module sqlite, Sqlite, $($test),*);
        on_each_database!(servers: $($test),*);
    };
}

mod administration;
mod attack;
mod buyers;
mod chaos;
mod check;
mod cluster;
mod commands;
mod contract;
mod costly;
mod crash;
mod credentials;
mod dependencies;
mod durability;
mod edge;
mod fuzz;
mod hostile;
mod ids;
#[cfg(feature = "lab")]
mod lab;
mod lifecycle;
mod login;
mod login_attack;
mod nodes;
mod outage;
mod page;
mod private_servers;
mod proof;
mod quarantine;
mod queued;
mod rebuild;
mod receiver;
mod recovery;
mod redis_tls;
mod reduce;
mod retirement;
mod sessions;
mod shared;
mod shared_cache;
mod shared_limits;
mod shared_sessions;
mod shielded;
mod shop;
mod statements;
mod storm;
mod webhook;
