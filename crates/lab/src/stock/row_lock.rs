//! Lock the row while deducting.
//!
//! Adds: `SELECT … FOR UPDATE`. The first transaction locks the row, and all others wait until it has committed.
//! Wrong: nothing is sold twice, but every buyer holds a connection while they wait, even those who get nothing.
//! Next: a version column needs no lock between reading and writing.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/row-lock",
    family: Family::Stock,
    expected: Expected::Sound,
    because: "the row lock lets one buyer at a time read and deduct",
    needs: &[ServerKind::MariaDb],
    source: include_str!("row_lock.rs"),
    story_zh: "悲观锁：用 SELECT … FOR UPDATE 锁住库存行，提交之前其他事务只能等待。\n\
        问题：不会超卖，但每个请求（包括抢不到的）都要占着一个连接排队。\n\
        下一版：用版本号做乐观锁，读和写之间不再持锁。",
    run: |lab, version| Box::pin(race_and_load::<RowLock>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct RowLock {
    db: MySqlPool,
    site: Site,
}

impl Shop for RowLock {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let mut tx = self.db.begin().await?;
        let (stock,): (i64,) = sqlx::query_as("SELECT stock FROM voucher WHERE id = ? FOR UPDATE")
            .bind(VOUCHER)
            .fetch_one(&mut *tx)
            .await?;
        if stock < 1 {
            tx.rollback().await?;
            return Ok(Answer::SoldOut);
        }
        self.site.race.pass().await;
        sqlx::query("UPDATE voucher SET stock = stock - 1 WHERE id = ?").bind(VOUCHER).execute(&mut *tx).await?;
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Answer::Bought)
    }
}
