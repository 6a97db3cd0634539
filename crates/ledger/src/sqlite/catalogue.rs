//! Shops and vouchers.

use async_trait::async_trait;
use sqlx::Row as _;
use stampede_core::ports::{Catalogue, Created, LedgerError, Result};
use stampede_core::{Money, Shop, ShopId, ShopTypeId, Voucher, VoucherId, VoucherKind};

use super::Sqlite;
use crate::failed;

/// An insert that may hang on a row that is not there.
fn created(done: std::result::Result<sqlx::sqlite::SqliteQueryResult, sqlx::Error>) -> Result<Created> {
    match done {
        Ok(_) => Ok(Created::Done),
        Err(sqlx::Error::Database(error)) if error.is_foreign_key_violation() => Ok(Created::NoParent),
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(Created::Exists),
        Err(error) => Err(failed(error)),
    }
}

#[async_trait]
impl Catalogue for Sqlite {
    async fn create_shop(&self, shop: &Shop) -> Result<Created> {
        let insert = sqlx::query("INSERT INTO shop (id, type_id, name, address) VALUES (?1, ?2, ?3, ?4)")
            .bind(shop.id.get())
            .bind(shop.type_id.get())
            .bind(&shop.name)
            .bind(&shop.address);
        created(insert.execute(&self.writer).await)
    }

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>> {
        let row = sqlx::query("SELECT type_id, name, address FROM shop WHERE id = ?1")
            .bind(id.get())
            .fetch_optional(&self.readers)
            .await
            .map_err(failed)?;
        let Some(row) = row else { return Ok(None) };
        let type_id = ShopTypeId::new(row.get(0)).map_err(|error| LedgerError::Poison(error.into()))?;
        Ok(Some(Shop { id, type_id, name: row.get(1), address: row.get(2) }))
    }

    async fn create_voucher(&self, voucher: &Voucher) -> Result<Created> {
        let insert = sqlx::query(
            "INSERT INTO voucher (id, shop_id, kind, title, subtitle, rules, price_cents, worth_cents)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )
        .bind(voucher.id.get())
        .bind(voucher.shop.get())
        .bind(voucher.kind.as_str())
        .bind(&voucher.title)
        .bind(&voucher.subtitle)
        .bind(&voucher.rules)
        .bind(voucher.price.cents())
        .bind(voucher.worth.cents());
        created(insert.execute(&self.writer).await)
    }

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>> {
        let row = sqlx::query(
            "SELECT shop_id, kind = 'flash_sale', title, subtitle, rules, price_cents, worth_cents
             FROM voucher WHERE id = ?1",
        )
        .bind(id.get())
        .fetch_optional(&self.readers)
        .await
        .map_err(failed)?;
        let Some(row) = row else { return Ok(None) };
        let voucher = || {
            Some(Voucher {
                id,
                shop: ShopId::new(row.get(0)).ok()?,
                kind: if row.get(1) { VoucherKind::FlashSale } else { VoucherKind::Ordinary },
                title: row.get(2),
                subtitle: row.get(3),
                rules: row.get(4),
                price: Money::from_cents(row.get(5))?,
                worth: Money::from_cents(row.get(6))?,
            })
        };
        let unreadable = || LedgerError::Poison(format!("voucher {id} cannot be read").into());
        Ok(Some(voucher().ok_or_else(unreadable)?))
    }
}
