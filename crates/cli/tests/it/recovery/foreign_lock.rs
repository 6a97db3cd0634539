//! Another client of the database that locks rows of sales or of orders.

use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use stampede_core::{OrderId, SaleId};

use crate::shop::{Kind, Storage};

/// A transaction that holds locks, until it is released.
pub enum ForeignLock {
    MariaDb(sqlx::MySqlConnection),
    Postgres(sqlx::PgConnection),
}

impl ForeignLock {
    pub async fn on_sales(kind: Kind, storage: &Storage, sales: &[SaleId]) -> Self {
        // One statement for each: with a list, MariaDB may read the whole table, and locks every row that it has read.
        let lock = |sale: &SaleId| format!("SELECT id FROM sale WHERE id = {sale} FOR UPDATE");
        Self::take(kind, storage, sales.iter().map(lock).collect()).await
    }

    pub async fn on_order(kind: Kind, storage: &Storage, order: OrderId) -> Self {
        Self::take(kind, storage, vec![format!("SELECT id FROM orders WHERE id = {order} FOR UPDATE")]).await
    }

    async fn take(kind: Kind, storage: &Storage, locks: Vec<String>) -> Self {
        let (url, lock) = (storage.url(), AssertSqlSafe(format!("BEGIN; {}", locks.join("; "))));
        match kind {
            Kind::Sqlite => panic!("SQLite locks no rows"),
            Kind::MariaDb => {
                let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
                raw_sql(lock).execute(&mut connection).await.unwrap();
                Self::MariaDb(connection)
            }
            Kind::Postgres => {
                let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
                raw_sql(lock).execute(&mut connection).await.unwrap();
                Self::Postgres(connection)
            }
        }
    }

    pub async fn release(self) {
        match self {
            Self::MariaDb(connection) => connection.close().await.unwrap(),
            Self::Postgres(connection) => connection.close().await.unwrap(),
        }
    }
}
