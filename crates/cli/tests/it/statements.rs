//! How many statements a database server executes.

use sqlx::{Connection as _, Row as _};
use stampede_testkit::Server;

use crate::quarantine::execute;
use crate::shop::{Kind, Storage};

/// A database server whose counters no other test raises, and the URL of a database on it.
pub async fn counting_server(kind: Kind) -> (Server, String) {
    let server = kind.own_server();
    let url = kind.create_database(&server, server.port());
    if kind == Kind::Postgres {
        // The counters of pg_stat_database are up to ten seconds behind, those of this extension are not.
        let storage = Storage::with(Some(url.clone()));
        execute(kind, &storage, "ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'").await;
        server.stop().unwrap();
        server.restart().unwrap();
        execute(kind, &storage, "CREATE EXTENSION pg_stat_statements").await;
    }
    (server, url)
}

/// The statements that the database has executed.
pub async fn database_statements(kind: Kind, storage: &Storage) -> u64 {
    let url = storage.url();
    match kind {
        Kind::MariaDb => {
            let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
            let row = sqlx::query("SHOW GLOBAL STATUS LIKE 'Questions'").fetch_one(&mut connection).await.unwrap();
            row.get::<String, _>(1).parse().unwrap()
        }
        Kind::Postgres => {
            let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
            let query = "SELECT CAST(sum(calls) AS BIGINT) FROM pg_stat_statements";
            let row = sqlx::query(query).fetch_one(&mut connection).await.unwrap();
            u64::try_from(row.get::<i64, _>(0)).unwrap()
        }
        Kind::Sqlite => panic!("SQLite has no counters"),
    }
}
