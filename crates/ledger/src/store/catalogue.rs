//! Shops and vouchers.

use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::{Catalogue, Created, LedgerError, Replaced, Result, ShopFilter};
use stampede_core::{Money, Shop, ShopId, ShopType, ShopTypeId, Voucher, VoucherId, VoucherKind};

use super::{Store, again, unreadable};
use crate::db::{Arg, Row, Tx, args};

const SHOPS: &str = "SELECT id, type_id, name, address FROM shop WHERE";
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

/// A part of a text, for LIKE with `ESCAPE '!'`: what means something to LIKE means only itself.
fn part(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len() + 8);
    pattern.push('%');
    for letter in text.chars() {
        if matches!(letter, '%' | '_' | '!') {
            pattern.push('!');
        }
        pattern.push(letter);
    }
    pattern.push('%');
    pattern
}

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

    async fn replace_shop(&self, shop: &Shop) -> Result<Replaced<Shop>> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        let parent = tx.row(&format!("SELECT id FROM shop_type WHERE id = ?{lock}"), args![shop.type_id.get()]).await?;
        let held = tx.row(&format!("{SHOPS} id = ?{lock}"), args![shop.id.get()]).await?;
        let done = match (held, parent) {
            (None, _) => Replaced::NoSuch,
            (_, None) => Replaced::NoParent,
            (Some(held), Some(_)) => {
                let update = "UPDATE shop SET type_id = ?, name = ?, address = ? WHERE id = ?";
                let (name, address) = (shop.name.as_str(), shop.address.as_str());
                tx.execute(update, args![shop.type_id.get(), name, address, shop.id.get()]).await?;
                Replaced::Done(read_shop(&held)?)
            }
        };
        tx.commit().await?;
        Ok(done)
    }

    /// The voucher as it is now, its row locked until the transaction ends.
    async fn locked_voucher(&self, tx: &mut Tx, id: VoucherId) -> Result<Option<Voucher>> {
        let lock = self.db.dialect().for_update();
        let row = tx.row(&format!("{VOUCHERS} id = ?{lock}"), args![id.get()]).await?;
        row.as_ref().map(read_voucher).transpose()
    }

    async fn set_shelf(&self, id: VoucherId, on_shelf: bool) -> Result<Replaced<Voucher>> {
        let mut tx = self.db.begin().await?;
        let Some(held) = self.locked_voucher(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(Replaced::NoSuch);
        };
        tx.execute("UPDATE voucher SET on_shelf = ? WHERE id = ?", args![i64::from(on_shelf), id.get()]).await?;
        tx.commit().await?;
        Ok(Replaced::Done(held))
    }

    async fn replace_voucher(&self, voucher: &Voucher) -> Result<Replaced<Voucher>> {
        let mut tx = self.db.begin().await?;
        let Some(held) = self.locked_voucher(&mut tx, voucher.id).await? else {
            tx.roll_back().await?;
            return Ok(Replaced::NoSuch);
        };
        let update =
            "UPDATE voucher SET title = ?, subtitle = ?, rules = ?, price_cents = ?, worth_cents = ? WHERE id = ?";
        let (title, subtitle, rules) = (voucher.title.as_str(), voucher.subtitle.as_str(), voucher.rules.as_str());
        let (price, worth) = (voucher.price.cents(), voucher.worth.cents());
        tx.execute(update, args![title, subtitle, rules, price, worth, voucher.id.get()]).await?;
        tx.commit().await?;
        Ok(Replaced::Done(held))
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

    async fn create_shop(&self, shop: &Shop) -> Result<Created> {
        let insert = "INSERT INTO shop (id, type_id, name, address) VALUES (?, ?, ?, ?)";
        let values = args![shop.id.get(), shop.type_id.get(), shop.name.as_str(), shop.address.as_str()];
        again!(self.create("shop_type", shop.type_id.get(), insert, values))
    }

    async fn edit_shop(&self, shop: &Shop) -> Result<Replaced<Shop>> {
        again!(self.replace_shop(shop))
    }

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>> {
        let row = self.db.row(&format!("{SHOPS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_shop).transpose()
    }

    async fn shops(&self, filter: &ShopFilter) -> Result<Vec<Shop>> {
        let mut sql = format!("{SHOPS} id < ?");
        let before = filter.before.map_or(i64::MAX, ShopId::get);
        let pattern = filter.name.as_deref().map(part);
        let mut values = vec![Arg::from(before)];
        if let Some(type_id) = filter.type_id {
            sql.push_str(" AND type_id = ?");
            values.push(type_id.get().into());
        }
        if let Some(pattern) = &pattern {
            sql.push_str(" AND LOWER(name) LIKE LOWER(?) ESCAPE '!'");
            values.push(pattern.as_str().into());
        }
        sql.push_str(" ORDER BY id DESC LIMIT ?");
        values.push(filter.limit.into());
        self.db.rows(&sql, &values).await?.iter().map(read_shop).collect()
    }

    async fn create_voucher(&self, voucher: &Voucher) -> Result<Created> {
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
        again!(self.create("shop", voucher.shop.get(), insert, values))
    }

    async fn shelve_voucher(&self, id: VoucherId, on_shelf: bool) -> Result<Replaced<Voucher>> {
        again!(self.set_shelf(id, on_shelf))
    }

    async fn edit_voucher(&self, voucher: &Voucher) -> Result<Replaced<Voucher>> {
        again!(self.replace_voucher(voucher))
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
