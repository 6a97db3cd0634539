//! The suite on MariaDB and PostgreSQL: one private server each for all tests, a database of its own for each test.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use stampede_ledger::{Database, Stores, open};
use stampede_testkit::Server;

static MARIADB: LazyLock<Server> = LazyLock::new(|| stampede_testkit::mariadb::start().unwrap());
static POSTGRES: LazyLock<Server> = LazyLock::new(|| stampede_testkit::postgres::start().unwrap());

pub struct Fresh {
    pub stores: Stores,
    url: String,
}

fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("t{}", NEXT.fetch_add(1, Ordering::SeqCst))
}

impl Fresh {
    async fn new(url: String) -> Self {
        Self { stores: reopen(&url).await, url }
    }
}

async fn reopen(url: &str) -> Stores {
    open(&Database::parse(url).unwrap()).await.unwrap()
}

/// Two nodes start at the same moment on an empty database: both come up, and the tables are made once.
async fn two_migrate_at_once(url: String) {
    let nodes: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { reopen(&url).await })
        })
        .collect();
    for node in nodes {
        assert!(node.await.unwrap().ledger.sales(None).await.unwrap().is_empty());
    }
}

macro_rules! on {
    ($module:ident, $server:ident) => {
        mod $module {
            use super::*;
            use crate::conformance::suite;

            fn url() -> String {
                stampede_testkit::$module::create_database(&$server, &name()).unwrap()
            }

            suite!(Fresh::new(url()).await);

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn nodes_may_migrate_at_the_same_time() {
                two_migrate_at_once(url()).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn opened_again_it_holds_what_it_held() {
                let fresh = Fresh::new(url()).await;
                let sale = crate::conformance::sale_of(&fresh.stores, 2).await;
                crate::conformance::record(&fresh.stores, sale, &[(1, 1), (2, 2)]).await;
                let before = fresh.stores.ledger.load(sale).await.unwrap();
                fresh.stores.ledger.close().await;
                assert_eq!(reopen(&fresh.url).await.ledger.load(sale).await.unwrap(), before);
            }
        }
    };
}

on!(mariadb, MARIADB);
on!(postgres, POSTGRES);
