//! A fixed pool of 1,024 locks.
//!
//! Adds: users share 1,024 locks by a hash. The memory is the same for ten users and for ten million.
//! Wrong: users who share a lock by chance wait for each other. It holds on one node only.
//! Next: a lock per user that is removed when it is no longer used.

use sqlx::MySqlPool;
use tokio::sync::Mutex;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Result, Version};

const STRIPES: usize = 1024;

pub const VERSION: Version = Version {
    name: "one-per-person/striped-locks",
    family: Family::OnePerPerson,
    expected: Expected::Sound,
    because: "requests of one user share a stripe, and the number of stripes is fixed",
    needs: &[ServerKind::MariaDb],
    source: include_str!("striped_locks.rs"),
    story_zh: "固定 1024 把锁，按用户哈希选一把，内存占用与用户数无关。\n\
        问题：哈希碰到一起的不同用户会互相等待；而且只在单个节点内有效。\n\
        下一版：每个用户一把锁，用完即删。",
    run: |lab, version| Box::pin(race_and_load::<StripedLocks>(lab, version, Crowd::RACE_OF_ONE, 2)),
};

struct StripedLocks {
    db: MySqlPool,
    site: Site,
    locks: Vec<Mutex<()>>,
}

impl Shop for StripedLocks {
    async fn open(site: &Site) -> Result<Self> {
        let locks = (0..STRIPES).map(|_| Mutex::new(())).collect();
        Ok(Self { db: site.db()?, site: site.clone(), locks })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let stripe = user % STRIPES as u64;
        let _guard = self.locks[usize::try_from(stripe).unwrap_or(0)].lock().await;
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
}
