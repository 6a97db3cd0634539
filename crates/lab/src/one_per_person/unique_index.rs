//! A unique index on the user.
//!
//! Adds: the database itself refuses a second order of a user, whichever node sends it.
//! Wrong: nothing, but a second request is found out only after it has waited for the row of the stock.
//! Next: the family pre-deduction refuses it in Redis, and keeps this index as the last line of defence.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "one-per-person/unique-index",
    family: Family::OnePerPerson,
    expected: Expected::Sound,
    because: "the database refuses a second order of a user",
    needs: &[ServerKind::MariaDb],
    source: include_str!("unique_index.rs"),
    story_zh: "在订单表上建唯一索引，由数据库拒绝同一用户的第二单，不管请求来自哪个节点。\n\
        问题：结果正确，但重复请求要等到库存行锁之后才被发现。\n\
        下一步：“Redis 预扣减”提前拦住重复请求，唯一索引留作最后一道防线。",
    run: |lab, version| Box::pin(race_and_load::<UniqueIndex>(lab, version, Crowd::RACE_OF_ONE, 2)),
};

struct UniqueIndex {
    db: MySqlPool,
    site: Site,
}

impl Shop for UniqueIndex {
    async fn open(site: &Site) -> Result<Self> {
        let db = site.db()?;
        sqlx::query("ALTER TABLE orders ADD UNIQUE one_per_person (user_id)").execute(&db).await?;
        Ok(Self { db, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        let mut tx = self.db.begin().await?;
        // The stock first: its row lock also orders the insertions of one user, which could deadlock otherwise.
        let deduct = "UPDATE voucher SET stock = stock - 1 WHERE id = ? AND stock > 0";
        let deducted = sqlx::query(deduct).bind(VOUCHER).execute(&mut *tx).await?;
        if deducted.rows_affected() == 0 {
            tx.rollback().await?;
            return Ok(Answer::SoldOut);
        }
        match sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await {
            Ok(_) => tx.commit().await?,
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                tx.rollback().await?;
                return Ok(Answer::AlreadyBought);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Answer::Bought)
    }
}
