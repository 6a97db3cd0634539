//! Shops and vouchers.

use async_trait::async_trait;
use stampede_core::ports::{Catalogue, Created, LedgerError, Result};
use stampede_core::{Money, Shop, ShopId, ShopTypeId, Voucher, VoucherId, VoucherKind};

use super::{Store, unreadable};
use crate::db::{Arg, args};

impl Store {
    /// An insert under a parent that must be there.
    async fn create(&self, parent: &str, parent_id: i64, insert: &str, values: &[Arg<'_>]) -> Result<Created> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        if tx.row(&format!("SELECT id FROM {parent} WHERE id = ?{lock}"), args![parent_id]).await?.is_none() {
            tx.roll_back().await?;
            return Ok(Created::NoParent);
        }
        tx.execute(insert, values).await?;
        tx.commit().await?;
        Ok(Created::Done)
    }
}

#[async_trait]
impl Catalogue for Store {
    async fn create_shop(&self, shop: &Shop) -> Result<Created> {
        let insert = "INSERT INTO shop (id, type_id, name, address) VALUES (?, ?, ?, ?)";
        let values = args![shop.id.get(), shop.type_id.get(), shop.name.as_str(), shop.address.as_str()];
        self.create("shop_type", shop.type_id.get(), insert, values).await
    }

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>> {
        let row = self.db.row("SELECT type_id, name, address FROM shop WHERE id = ?", args![id.get()]).await?;
        let Some(row) = row else { return Ok(None) };
        let type_id = ShopTypeId::new(row.int(0)?).map_err(|error| LedgerError::Poison(error.into()))?;
        Ok(Some(Shop { id, type_id, name: row.text(1)?, address: row.text(2)? }))
    }

    async fn create_voucher(&self, voucher: &Voucher) -> Result<Created> {
        let insert = "INSERT INTO voucher (id, shop_id, kind, title, subtitle, rules, price_cents, worth_cents)
                      VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
        let values = args![
            voucher.id.get(),
            voucher.shop.get(),
            voucher.kind.as_str(),
            voucher.title.as_str(),
            voucher.subtitle.as_str(),
            voucher.rules.as_str(),
            voucher.price.cents(),
            voucher.worth.cents(),
        ];
        self.create("shop", voucher.shop.get(), insert, values).await
    }

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>> {
        let sql = "SELECT shop_id, kind, title, subtitle, rules, price_cents, worth_cents FROM voucher WHERE id = ?";
        let Some(row) = self.db.row(sql, args![id.get()]).await? else { return Ok(None) };
        let bad = || unreadable("a voucher");
        Ok(Some(Voucher {
            id,
            shop: ShopId::new(row.int(0)?).map_err(|_| bad())?,
            kind: VoucherKind::parse(&row.text(1)?).ok_or_else(bad)?,
            title: row.text(2)?,
            subtitle: row.text(3)?,
            rules: row.text(4)?,
            price: Money::from_cents(row.int(5)?).ok_or_else(bad)?,
            worth: Money::from_cents(row.int(6)?).ok_or_else(bad)?,
        }))
    }
}
