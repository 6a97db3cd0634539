//! One lock per user, kept for ever.
//!
//! Adds: a map from users to locks in the process. Requests of one user run one after another.
//! Wrong: an entry of the map is never removed. Every user who ever came costs memory until the process ends.
//! Next: a fixed number of locks, shared by all users.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "one-per-person/leaking-lock",
    family: Family::OnePerPerson,
    expected: Expected::Flawed(Flaw::Leaked),
    because: "the map of locks is never cleaned",
    needs: &[ServerKind::MariaDb],
    source: include_str!("leaking_lock.rs"),
    story_zh: "进程内为每个用户建一把锁，同一个人的请求依次执行。\n\
        问题：锁放进表里就再也不删，来过的每个用户都一直占内存（相当于 intern 进常量池）。\n\
        下一版：用固定数量的锁，按哈希分摊。",
    run: |lab, version| Box::pin(race_and_load::<LeakingLock>(lab, version, Crowd::RACE_OF_ONE, 2)),
};

struct LeakingLock {
    db: MySqlPool,
    site: Site,
    locks: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
}

impl Shop for LeakingLock {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone(), locks: Mutex::default() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let lock = self.locks.lock().entry(user).or_default().clone();
        let _guard = lock.lock().await;
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
        Some(self.locks.lock().len() as u64)
    }
}
