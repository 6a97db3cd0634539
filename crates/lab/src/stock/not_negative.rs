//! Deduct if the stock is not negative.
//!
//! Adds: the condition `stock >= 0` in the deduction itself. Nobody is refused because another buyer was faster.
//! Wrong: at a stock of zero the condition still holds, so one item too many is sold.
//! Next: `stock > 0`.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/not-negative",
    family: Family::Stock,
    expected: Expected::Flawed(Flaw::Oversold),
    because: "the condition still holds when the stock is zero",
    needs: &[ServerKind::MariaDb],
    source: include_str!("not_negative.rs"),
    story_zh: "把条件写进扣减语句：stock >= 0，不再因为别人先买而被误拒。\n\
        问题：库存为零时条件仍然成立，总会多卖一件。\n\
        下一版：改成 stock > 0。",
    run: |lab, version| Box::pin(race_and_load::<NotNegative>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct NotNegative {
    db: MySqlPool,
    site: Site,
}

impl Shop for NotNegative {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        let mut tx = self.db.begin().await?;
        let deduct = "UPDATE voucher SET stock = stock - 1 WHERE id = ? AND stock >= 0";
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
