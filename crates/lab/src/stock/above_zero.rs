//! Deduct if the stock is above zero.
//!
//! Adds: the condition `stock > 0` in the deduction itself. The database checks and deducts in one step, under its own row lock.
//! Wrong: nothing is oversold or left unsold, but every buyer costs a transaction at the same row, and a person can buy twice.
//! Next: the family one-per-person stops the second order; the family pre-deduction takes the load off the database.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/above-zero",
    family: Family::Stock,
    expected: Expected::Sound,
    because: "the database checks and deducts in one step",
    needs: &[ServerKind::MariaDb],
    source: include_str!("above_zero.rs"),
    story_zh: "把条件写进扣减语句：stock > 0。检查和扣减由数据库在一条语句里完成，靠它自己的行锁保证。\n\
        问题：不超卖也不少卖，但所有请求都在争同一行，数据库压力大；而且同一个人还能买多件。\n\
        下一步：“一人一单”解决重复下单，“Redis 预扣减”为数据库减压。",
    run: |lab, version| Box::pin(race_and_load::<AboveZero>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct AboveZero {
    db: MySqlPool,
    site: Site,
}

impl Shop for AboveZero {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        let mut tx = self.db.begin().await?;
        let deduct = "UPDATE voucher SET stock = stock - 1 WHERE id = ? AND stock > 0";
        let deducted = sqlx::query(deduct).bind(VOUCHER).execute(&mut *tx).await?;
        if deducted.rows_affected() == 0 {
            tx.rollback().await?;
            return Ok(Answer::SoldOut);
        }
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Answer::Bought)
    }
}
