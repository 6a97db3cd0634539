//! A lock per user that is removed when unused.
//!
//! Adds: the keyed mutex of `stampede-lock`. Only requests of the same user wait for each other, and no entry stays behind.
//! Wrong: it holds on one node only. Two nodes have two locks for the same user.
//! Next: a unique index in the database holds for all nodes; the family locks has locks that they share.

use sqlx::MySqlPool;
use stampede_lock::KeyedMutex;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "one-per-person/keyed-lock",
    family: Family::OnePerPerson,
    expected: Expected::Sound,
    because: "requests of one user wait for each other, and an unused lock is removed",
    needs: &[ServerKind::MariaDb],
    source: include_str!("keyed_lock.rs"),
    story_zh: "每个用户一把锁，没人用时立即移除：既不误伤别的用户，也不泄漏内存。\n\
        问题：只在单个节点内有效，两个节点就有两把锁。\n\
        下一版：数据库唯一索引，对所有节点都有效；跨节点的锁见“分布式锁”。",
    run: |lab, version| Box::pin(race_and_load::<KeyedLock>(lab, version, Crowd::RACE_OF_ONE, 2)),
};

struct KeyedLock {
    db: MySqlPool,
    site: Site,
    locks: KeyedMutex<u64>,
}

impl Shop for KeyedLock {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone(), locks: KeyedMutex::new() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let _guard = self.locks.lock(user).await;
        let (orders,): (i64,) =
            sqlx::query_as("SELECT COUNT(*) FROM orders WHERE user_id = ?").bind(user).fetch_one(&self.db).await?;
        if orders > 0 {
            return Ok(Answer::AlreadyBought);
        }
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

    fn leaked(&self) -> Option<u64> {
        Some(self.locks.len() as u64)
    }
}
