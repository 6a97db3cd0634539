//! Count the orders of the user, then insert.
//!
//! Adds: a query for orders of the user. A user that has one is refused.
//! Wrong: two requests of the same user can both count zero before either inserts.
//! Next: a lock per user makes the requests of one user wait for each other.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "one-per-person/check-then-insert",
    family: Family::OnePerPerson,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "all requests counted zero orders before one was inserted",
    needs: &[ServerKind::MariaDb],
    source: include_str!("check_then_insert.rs"),
    story_zh: "下单前先查这个用户有没有订单，有就拒绝。\n\
        问题：同一个人的两个请求可能都查到零条，然后都插入，一人多单。\n\
        下一版：给每个用户一把锁，让同一个人的请求排队。",
    run: |lab, version| Box::pin(race_and_load::<CheckThenInsert>(lab, version, Crowd::RACE_OF_ONE, 2)),
};

struct CheckThenInsert {
    db: MySqlPool,
    site: Site,
}

impl Shop for CheckThenInsert {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
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
