//! Read the stock, then deduct.
//!
//! Adds: the sale. The stock is read; if there is any, one is deducted and the order is inserted.
//! Wrong: the deduction does not check again. All buyers who have read a stock above zero deduct, however many they are.
//! Next: a row lock lets one buyer at a time read and deduct.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/no-check",
    family: Family::Stock,
    expected: Expected::Flawed(Flaw::Oversold),
    because: "the deduction does not look at the stock again",
    needs: &[ServerKind::MariaDb],
    source: include_str!("no_check.rs"),
    story_zh: "先查库存，大于零就扣减一件并写入订单。\n\
        问题：查询和扣减之间没有任何保护，读到“还有库存”的请求会全部扣减，于是超卖。\n\
        下一版：用行锁让同一时刻只有一个请求完成“查询并扣减”。",
    run: |lab, version| Box::pin(race_and_load::<NoCheck>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct NoCheck {
    db: MySqlPool,
    site: Site,
}

impl Shop for NoCheck {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let (stock,): (i64,) =
            sqlx::query_as("SELECT stock FROM voucher WHERE id = ?").bind(VOUCHER).fetch_one(&self.db).await?;
        if stock < 1 {
            return Ok(Answer::SoldOut);
        }
        self.site.race.pass().await;
        let mut tx = self.db.begin().await?;
        sqlx::query("UPDATE voucher SET stock = stock - 1 WHERE id = ?").bind(VOUCHER).execute(&mut *tx).await?;
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Answer::Bought)
    }
}
