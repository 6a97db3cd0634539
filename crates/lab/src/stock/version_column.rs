//! Compare a version column.
//!
//! Adds: an optimistic lock. The version is read with the stock, and the deduction is valid only if the version is still the same.
//! Wrong: of all buyers that have read the same version, one succeeds. The others are refused although there is stock, and it stays unsold.
//! Next: the stock itself can be the version, which saves the column.

use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::servers::ServerKind;
use crate::site::{Site, VOUCHER};
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "stock/version-column",
    family: Family::Stock,
    expected: Expected::Flawed(Flaw::Undersold),
    because: "of all who read the same version, one succeeds",
    needs: &[ServerKind::MariaDb],
    source: include_str!("version_column.rs"),
    story_zh: "乐观锁：读库存时一并读出版本号，扣减时要求版本号没有变化。\n\
        问题：读到同一版本号的请求只有一个成功，其余的明明还有库存却被拒绝，商品卖不完。\n\
        下一版：直接拿库存当版本号，省去一列。",
    run: |lab, version| Box::pin(race_and_load::<VersionColumn>(lab, version, Crowd::RACE_FOR_STOCK, 1)),
};

struct VersionColumn {
    db: MySqlPool,
    site: Site,
}

impl Shop for VersionColumn {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let (stock, version): (i64, i64) =
            sqlx::query_as("SELECT stock, version FROM voucher WHERE id = ?").bind(VOUCHER).fetch_one(&self.db).await?;
        if stock < 1 {
            return Ok(Answer::SoldOut);
        }
        self.site.race.pass().await;
        let mut tx = self.db.begin().await?;
        let deduct = "UPDATE voucher SET stock = stock - 1, version = version + 1 WHERE id = ? AND version = ?";
        let deducted = sqlx::query(deduct).bind(VOUCHER).bind(version).execute(&mut *tx).await?;
        if deducted.rows_affected() == 0 {
            tx.rollback().await?;
            return Ok(Answer::Busy);
        }
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(Answer::Bought)
    }
}
