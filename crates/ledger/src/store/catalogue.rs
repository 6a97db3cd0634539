//! Shops and vouchers.

use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::{Catalogue, CreateOutcome, LedgerError, ReplaceOutcome, Result, ShopFilter, ShopPage};
use stampede_core::{Money, Shop, ShopId, ShopType, ShopTypeId, Timestamp, Voucher, VoucherId, VoucherKind};

use super::shop_search::{delete_ngrams, fold, insert_ngrams};
use super::{Store, retry_conflicts, unreadable};
use crate::db::{Arg, Row, Tx, args};

pub(super) const SHOPS: &str = "SELECT id, type_id, name, address FROM shop WHERE";
const VOUCHERS: &str =
    "SELECT id, shop_id, kind, title, subtitle, rules, price_cents, worth_cents, on_shelf FROM voucher WHERE";

/// The shop in a row of [`SHOPS`].
fn read_shop(row: &Row) -> Result<Shop> {
    Ok(Shop {
        id: ShopId::new(row.int(0)?).map_err(|_| unreadable("a shop"))?,
        type_id: ShopTypeId::new(row.int(1)?).map_err(|_| unreadable("a shop"))?,
        name: row.text(2)?,
        address: row.text(3)?,
    })
}

fn read_shop_ids(rows: &[Row]) -> Result<Vec<ShopId>> {
    rows.iter().map(|row| ShopId::new(row.int(0)?).map_err(|_| unreadable("a shop"))).collect()
}

/// The voucher in a row of [`VOUCHERS`].
fn read_voucher(row: &Row) -> Result<Voucher> {
    let bad = || unreadable("a voucher");
    Ok(Voucher {
        id: VoucherId::new(row.int(0)?).map_err(|_| bad())?,
        shop: ShopId::new(row.int(1)?).map_err(|_| bad())?,
        kind: VoucherKind::parse(&row.text(2)?).ok_or_else(bad)?,
        title: row.text(3)?,
        subtitle: row.text(4)?,
        rules: row.text(5)?,
        price: Money::from_cents(row.int(6)?).ok_or_else(bad)?,
        worth: Money::from_cents(row.int(7)?).ok_or_else(bad)?,
        on_shelf: row.int(8)? == 1,
    })
}

impl Store {
    /// The newest shops that a query finds, of the filter's type and up to its limit.
    pub(super) async fn read_shops(
        &self,
        filter: &ShopFilter,
        mut sql: String,
        mut values: Vec<Arg<'_>>,
    ) -> Result<Vec<Shop>> {
        if let Some(type_id) = filter.type_id {
            sql.push_str(" AND type_id = ?");
            values.push(type_id.get().into());
        }
        sql.push_str(" ORDER BY id DESC LIMIT ?");
        values.push(filter.limit.into());
        self.db.rows(&sql, &values).await?.iter().map(read_shop).collect()
    }

    /// Begins a transaction with the parent's row locked; `None` if it does not exist.
    async fn begin_with_parent(&self, parent: &str, id: i64) -> Result<Option<Tx>> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        if tx.row(&format!("SELECT id FROM {parent} WHERE id = ?{lock}"), args![id]).await?.is_none() {
            tx.roll_back().await?;
            return Ok(None);
        }
        Ok(Some(tx))
    }

    async fn insert_shop(&self, shop: &Shop) -> Result<CreateOutcome> {
        let Some(mut tx) = self.begin_with_parent("shop_type", shop.type_id.get()).await? else {
            return Ok(CreateOutcome::ParentMissing);
        };
        let insert = "INSERT INTO shop (id, type_id, name, folded_name, address) VALUES (?, ?, ?, ?, ?)";
        let (name, folded, address) = (shop.name.as_str(), fold(&shop.name), shop.address.as_str());
        tx.execute(insert, args![shop.id.get(), shop.type_id.get(), name, folded.as_str(), address]).await?;
        insert_ngrams(&mut tx, shop).await?;
        tx.commit().await?;
        Ok(CreateOutcome::Created)
    }

    async fn insert_voucher(&self, voucher: &Voucher) -> Result<CreateOutcome> {
        let Some(mut tx) = self.begin_with_parent("shop", voucher.shop.get()).await? else {
            return Ok(CreateOutcome::ParentMissing);
        };
        let insert =
            "INSERT INTO voucher (id, shop_id, kind, title, subtitle, rules, price_cents, worth_cents, on_shelf)
                      VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let values = args![
            voucher.id.get(),
            voucher.shop.get(),
            voucher.kind.as_str(),
            voucher.title.as_str(),
            voucher.subtitle.as_str(),
            voucher.rules.as_str(),
            voucher.price.cents(),
            voucher.worth.cents(),
            i64::from(voucher.on_shelf),
        ];
        tx.execute(insert, values).await?;
        tx.commit().await?;
        Ok(CreateOutcome::Created)
    }

    async fn replace_shop(&self, shop: &Shop) -> Result<ReplaceOutcome<Shop>> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        let parent = tx.row(&format!("SELECT id FROM shop_type WHERE id = ?{lock}"), args![shop.type_id.get()]).await?;
        let held = tx.row(&format!("{SHOPS} id = ?{lock}"), args![shop.id.get()]).await?;
        let done = match (held, parent) {
            (None, _) => ReplaceOutcome::NotFound,
            (_, None) => ReplaceOutcome::ParentMissing,
            (Some(held), Some(_)) => {
                let held = read_shop(&held)?;
                let update = "UPDATE shop SET type_id = ?, name = ?, folded_name = ?, address = ? WHERE id = ?";
                let (name, folded, address) = (shop.name.as_str(), fold(&shop.name), shop.address.as_str());
                tx.execute(update, args![shop.type_id.get(), name, folded.as_str(), address, shop.id.get()]).await?;
                delete_ngrams(&mut tx, &held).await?;
                insert_ngrams(&mut tx, shop).await?;
                ReplaceOutcome::Done(held)
            }
        };
        tx.commit().await?;
        Ok(done)
    }

    /// Reads the voucher and locks its row until the transaction ends.
    async fn locked_voucher(&self, tx: &mut Tx, id: VoucherId) -> Result<Option<Voucher>> {
        let lock = self.db.dialect().for_update();
        let row = tx.row(&format!("{VOUCHERS} id = ?{lock}"), args![id.get()]).await?;
        row.as_ref().map(read_voucher).transpose()
    }

    async fn set_shelf(&self, id: VoucherId, on_shelf: bool) -> Result<ReplaceOutcome<Voucher>> {
        let mut tx = self.db.begin().await?;
        let Some(held) = self.locked_voucher(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(ReplaceOutcome::NotFound);
        };
        tx.execute("UPDATE voucher SET on_shelf = ? WHERE id = ?", args![i64::from(on_shelf), id.get()]).await?;
        tx.commit().await?;
        Ok(ReplaceOutcome::Done(held))
    }

    async fn replace_voucher(&self, voucher: &Voucher) -> Result<ReplaceOutcome<Voucher>> {
        let mut tx = self.db.begin().await?;
        let Some(held) = self.locked_voucher(&mut tx, voucher.id).await? else {
            tx.roll_back().await?;
            return Ok(ReplaceOutcome::NotFound);
        };
        let update =
            "UPDATE voucher SET title = ?, subtitle = ?, rules = ?, price_cents = ?, worth_cents = ? WHERE id = ?";
        let (title, subtitle, rules) = (voucher.title.as_str(), voucher.subtitle.as_str(), voucher.rules.as_str());
        let (price, worth) = (voucher.price.cents(), voucher.worth.cents());
        tx.execute(update, args![title, subtitle, rules, price, worth, voucher.id.get()]).await?;
        tx.commit().await?;
        Ok(ReplaceOutcome::Done(held))
    }
}

#[async_trait]
impl Catalogue for Store {
    async fn shop_types(&self) -> Result<Vec<ShopType>> {
        let read = |row: &Row| {
            let id = ShopTypeId::new(row.int(0)?).map_err(|_| unreadable("a shop type"))?;
            Ok(ShopType { id, name: row.text(1)? })
        };
        self.db.rows("SELECT id, name FROM shop_type ORDER BY sort, id", &[]).await?.iter().map(read).collect()
    }

    async fn create_shop(&self, shop: &Shop) -> Result<CreateOutcome> {
        retry_conflicts!(self.insert_shop(shop))
    }

    async fn edit_shop(&self, shop: &Shop) -> Result<ReplaceOutcome<Shop>> {
        retry_conflicts!(self.replace_shop(shop))
    }

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>> {
        let row = self.db.row(&format!("{SHOPS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_shop).transpose()
    }

    async fn shops(&self, filter: &ShopFilter) -> Result<ShopPage> {
        if let Some(name) = &filter.name {
            return self.search_shops(filter, name).await;
        }
        let before = filter.before.map_or(i64::MAX, ShopId::get);
        let shops = self.read_shops(filter, format!("{SHOPS} id < ?"), vec![Arg::from(before)]).await?;
        let next = shops.last().filter(|_| shops.len() == filter.limit as usize).map(|shop| shop.id);
        Ok(ShopPage { shops, next })
    }

    async fn shop_ids(&self, after: Option<ShopId>, limit: u32) -> Result<Vec<ShopId>> {
        let sql = "SELECT id FROM shop WHERE id > ? ORDER BY id LIMIT ?";
        read_shop_ids(&self.db.rows(sql, args![after.map_or(0, ShopId::get), limit]).await?)
    }

    async fn shops_with_sales(&self, end_after: Timestamp, limit: u32) -> Result<Vec<ShopId>> {
        let sql = "SELECT voucher.shop_id FROM sale JOIN voucher ON voucher.id = sale.voucher_id
            WHERE sale.end_at > ? GROUP BY voucher.shop_id ORDER BY MIN(sale.end_at), voucher.shop_id LIMIT ?";
        read_shop_ids(&self.db.rows(sql, args![end_after.ms(), limit]).await?)
    }

    async fn create_voucher(&self, voucher: &Voucher) -> Result<CreateOutcome> {
        retry_conflicts!(self.insert_voucher(voucher))
    }

    async fn shelve_voucher(&self, id: VoucherId, on_shelf: bool) -> Result<ReplaceOutcome<Voucher>> {
        retry_conflicts!(self.set_shelf(id, on_shelf))
    }

    async fn edit_voucher(&self, voucher: &Voucher) -> Result<ReplaceOutcome<Voucher>> {
        retry_conflicts!(self.replace_voucher(voucher))
    }

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>> {
        let row = self.db.row(&format!("{VOUCHERS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_voucher).transpose()
    }

    async fn vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>> {
        let sql = format!("{VOUCHERS} shop_id = ? ORDER BY id DESC LIMIT 100");
        self.db.rows(&sql, args![shop.get()]).await?.iter().map(read_voucher).collect()
    }
}
