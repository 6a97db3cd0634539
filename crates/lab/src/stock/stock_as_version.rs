//! Compare the stock that was read.
//!
//! Adds: the stock is its own version: the deduction is valid only if the stock is still what was read.
//! Wrong: the same as with a version column. Of all buyers that have read the same stock, one succeeds, and the rest stays unsold.
//! Next: a buyer does not care what the stock is, as long as there is one left. The condition becomes an inequality.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/stock-as-version",
    family: Family::Stock,
    expected: Expected::Flawed(Flaw::Undersold),
    because: "of all who read the same stock, one succeeds",
    needs: &[ServerKind::MariaDb],
    source: include_str!("stock_as_version.rs"),
    story_zh: "用库存本身当版本号：扣减时要求库存等于之前读到的值。\n\
        问题：和版本号一样，读到同一库存的请求只有一个成功，库存剩下卖不掉。\n\
        下一版：其实只要还有库存就行，不必与读到的值相等，把等号改成不等号。",
    run: |lab, version| Box::pin(race_and_load::<StockAsVersion>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct StockAsVersion {
    db: MySqlPool,
    site: Site,
}

impl Shop for StockAsVersion {
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
        let deduct = "UPDATE voucher SET stock = stock - 1 WHERE id = ? AND stock = ?";
        let deducted = sqlx::query(deduct).bind(VOUCHER).bind(stock).execute(&mut *tx).await?;
        if deducted.rows_affected() == 0 {
            tx.rollback().await?;
            return Ok(Answer::Busy);
        }
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Answer::Bought)
    }
}
