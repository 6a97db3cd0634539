//! Sales: reading, creating, editing. Every edit increments the version (column `ver`).

use stampede_core::ports::{CreateOutcome, EditOutcome, LoadedSale, OrderRow, Result, SaleDraft, SaleRecords};
use stampede_core::{Epoch, Money, OrderId, Sale, SaleId, SalePhase, SaleStatus, Timestamp, UserId, VoucherId, Window};

use super::orders::{ROWS, read_row};
use super::quarantine::WITHOUT_ROW;
use super::stock::read_stock_changes;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args};

const SALES: &str = "SELECT sale.id, voucher_id, title, sale.price_cents, worth_cents, status, begin_at, end_at,
        total, cap, sold, epoch, ver, released, phase
    FROM sale JOIN voucher ON voucher.id = voucher_id";

/// The number of orders that an inspection reads per statement.
const INSPECTED_AT_ONCE: u32 = 50_000;

/// The sale in a row of [`SALES`].
fn read(row: &Row) -> Result<Sale> {
    let bad = || unreadable("a sale");
    let count = |column| u32::try_from(row.int(column)?).map_err(|_| bad());
    Ok(Sale {
        id: SaleId::new(row.int(0)?).map_err(|_| bad())?,
        voucher: VoucherId::new(row.int(1)?).map_err(|_| bad())?,
        title: row.text(2)?,
        price: Money::from_cents(row.int(3)?).ok_or_else(bad)?,
        worth: Money::from_cents(row.int(4)?).ok_or_else(bad)?,
        status: SaleStatus::parse(&row.text(5)?).ok_or_else(bad)?,
        window: Window { begin: Timestamp::from_ms(row.int(6)?), end: Timestamp::from_ms(row.int(7)?) },
        total: count(8)?,
        cap: count(9)?,
        sold: count(10)?,
        epoch: Epoch(row.int(11)?),
        version: row.int(12)?,
        released: row.int(13)?,
        phase: SalePhase::parse(&row.text(14)?).ok_or_else(bad)?,
    })
}

async fn find(tx: &mut Tx, id: SaleId) -> Result<Option<Sale>> {
    let row = tx.row(&format!("{SALES} WHERE sale.id = ?"), args![id.get()]).await?;
    row.as_ref().map(read).transpose()
}

/// The users and orders that a gate holds marks for: the live orders, and those in quarantine, whose stock stays reserved until an
/// operator acts.
pub(super) async fn read_marks(tx: &mut Tx, id: SaleId, sold: u32) -> Result<Vec<(UserId, OrderId)>> {
    let mut pairs = Vec::with_capacity(sold as usize);
    for sql in [
        "SELECT user_id, id FROM orders WHERE sale_id = ? AND live = 1",
        &format!("SELECT user_id, order_id FROM quarantine WHERE sale_id = ? AND {WITHOUT_ROW}"),
    ] {
        tx.pairs(sql, args![id.get()], &mut pairs).await?;
    }
    let mark = |(user, order)| Some((UserId::new(user).ok()?, OrderId::new(order).ok()?));
    let marks: Option<Vec<_>> = pairs.into_iter().map(mark).collect();
    marks.ok_or_else(|| unreadable("an order"))
}

impl Store {
    pub(super) async fn read_sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>> {
        let end_after = end_after.map_or(i64::MIN, Timestamp::ms);
        let rows = self.db.rows(&format!("{SALES} WHERE end_at > ? ORDER BY sale.id DESC"), args![end_after]).await?;
        rows.iter().map(read).collect()
    }

    pub(super) async fn read_sale(&self, id: SaleId) -> Result<Option<Sale>> {
        let row = self.db.row(&format!("{SALES} WHERE sale.id = ?"), args![id.get()]).await?;
        row.as_ref().map(read).transpose()
    }

    pub(super) async fn load_sale(&self, id: SaleId) -> Result<Option<LoadedSale>> {
        // One snapshot, so that the sale's row matches its orders.
        let mut tx = self.db.snapshot().await?;
        let Some(sale) = find(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(None);
        };
        let marks = read_marks(&mut tx, id, sale.sold).await?;
        tx.roll_back().await?;
        Ok(Some(LoadedSale { sale, marks }))
    }

    pub(super) async fn inspect_sale(&self, id: SaleId) -> Result<Option<SaleRecords>> {
        let mut tx = self.db.snapshot().await?;
        let Some(sale) = find(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(None);
        };
        let mut orders: Vec<OrderRow> = Vec::new();
        loop {
            let after = orders.last().map_or(0, |row| row.order.id.get());
            let rows = tx.rows(ROWS, args![id.get(), after, INSPECTED_AT_ONCE]).await?;
            for row in &rows {
                orders.push(read_row(row)?);
            }
            if rows.len() < INSPECTED_AT_ONCE as usize {
                break;
            }
        }
        let (mut quarantine, mut pending_releases) = (Vec::new(), Vec::new());
        let in_quarantine = format!("SELECT user_id, order_id FROM quarantine WHERE sale_id = ? AND {WITHOUT_ROW}");
        tx.pairs(&in_quarantine, args![id.get()], &mut quarantine).await?;
        tx.pairs(
            "SELECT user_id, order_id FROM pending_releases WHERE sale_id = ?",
            args![id.get()],
            &mut pending_releases,
        )
        .await?;
        let stock_changes = read_stock_changes(&mut tx, id).await?;
        tx.roll_back().await?;
        let mark = |(user, order): (i64, i64)| Some((UserId::new(user).ok()?, OrderId::new(order).ok()?));
        let marks = |pairs: Vec<(i64, i64)>| pairs.into_iter().map(mark).collect::<Option<Vec<_>>>();
        let quarantine = marks(quarantine).ok_or_else(|| unreadable("a quarantined order"))?;
        let pending_releases = marks(pending_releases).ok_or_else(|| unreadable("a row of pending_releases"))?;
        let pending_releases = pending_releases.into_iter().map(|(_, order)| order).collect();
        Ok(Some(SaleRecords { sale, orders, quarantine, pending_releases, stock_changes }))
    }

    pub(super) async fn insert_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<CreateOutcome> {
        let SaleDraft { id, voucher, stock, window, status } = draft;
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        // The voucher's row is locked, so that concurrent creations of its sale are serialized.
        let price = format!("SELECT price_cents FROM voucher WHERE id = ? AND kind = 'flash_sale'{lock}");
        let Some(price) = tx.row(&price, args![voucher.get()]).await? else {
            tx.roll_back().await?;
            return Ok(CreateOutcome::ParentMissing);
        };
        if tx.row("SELECT id FROM sale WHERE voucher_id = ?", args![voucher.get()]).await?.is_some() {
            tx.roll_back().await?;
            return Ok(CreateOutcome::AlreadyExists);
        }
        let insert = "INSERT INTO sale (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, created_at)
                      VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let (begin, end) = (window.begin.ms(), window.end.ms());
        let values = args![id.get(), voucher.get(), price.int(0)?, status.as_str(), begin, end, stock, stock, now.ms()];
        tx.execute(insert, values).await?;
        tx.commit().await?;
        Ok(CreateOutcome::Created)
    }

    /// Reads the sale and locks its row until the transaction ends.
    pub(super) async fn locked(&self, tx: &mut Tx, id: SaleId) -> Result<Option<Sale>> {
        let lock = self.db.dialect().for_update();
        tx.rows(&format!("SELECT id FROM sale WHERE id = ?{lock}"), args![id.get()]).await?;
        find(tx, id).await
    }

    pub(super) async fn edit_status(&self, id: SaleId, status: SaleStatus) -> Result<EditOutcome> {
        let mut tx = self.db.begin().await?;
        let refused = match self.locked(&mut tx, id).await? {
            None => EditOutcome::NoSuchSale,
            Some(sale) if sale.status == status => EditOutcome::Repeated(sale),
            Some(sale) if !sale.status.may_become(status) => EditOutcome::Illegal(sale.status),
            Some(before) => {
                let after = Sale { status, version: before.version + 1, ..before.clone() };
                let update = "UPDATE sale SET status = ?, ver = ? WHERE id = ?";
                tx.execute(update, args![status.as_str(), after.version, id.get()]).await?;
                tx.commit().await?;
                return Ok(EditOutcome::Done { before, after });
            }
        };
        tx.roll_back().await?;
        Ok(refused)
    }
}
