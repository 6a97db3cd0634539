//! Sales: reading and creating. Every edit (`sale_edits`, `stock`) increments the version (column `ver`).

use stampede_core::ports::{CreateOutcome, LoadedSale, OrderRow, Result, SaleDraft, SaleRecords};
use stampede_core::{Epoch, Money, OrderId, Sale, SaleId, SalePhase, SaleStatus, Timestamp, UserId, VoucherId, Window};

use super::events::read_events_in;
use super::orders::{ROWS, read_row};
use super::payments::read_payments_in;
use super::quarantine::WITHOUT_ROW;
use super::sale_edits::read_edits;
use super::stock::read_stock_changes;
use super::{Store, unreadable};
use crate::db::{Row, Tx, args};

/// A sale that was opened under another incarnation of the gate is closing: a rebuild that begins changes no row of a sale.
const SALES: &str = "SELECT sale.id, voucher_id, title, sale.price_cents, worth_cents, status, begin_at, end_at,
        total, cap, sold, epoch, ver, released,
        CASE WHEN phase = 'open' AND sale.incarnation <> gate.incarnation THEN 'closing' ELSE phase END, payment_deadline_ms,
        buy_again
    FROM sale JOIN voucher ON voucher.id = voucher_id JOIN gate ON gate.id = 1";

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
        payment_deadline_ms: count(15)?,
        buy_again: row.int(16)? != 0,
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

/// The orders that a gate remembers in a sale in which nobody may buy again: one of each user who has only ended ones.
pub(super) async fn read_ended(tx: &mut Tx, sale: &Sale) -> Result<Vec<(UserId, OrderId)>> {
    let mut pairs = Vec::new();
    if !sale.buy_again {
        let sql = "SELECT user_id, MAX(id) FROM orders WHERE sale_id = ? AND status <> 'rejected' GROUP BY user_id
            HAVING COUNT(live) = 0";
        tx.pairs(sql, args![sale.id.get()], &mut pairs).await?;
    }
    let read = |(user, order)| Some((UserId::new(user).ok()?, OrderId::new(order).ok()?));
    let ended: Option<Vec<_>> = pairs.into_iter().map(read).collect();
    ended.ok_or_else(|| unreadable("an order"))
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
        let (marks, ended) = (read_marks(&mut tx, id, sale.sold).await?, read_ended(&mut tx, &sale).await?);
        tx.roll_back().await?;
        Ok(Some(LoadedSale { sale, marks, ended }))
    }

    pub(super) async fn inspect_sale(&self, id: SaleId) -> Result<Option<SaleRecords>> {
        let mut tx = self.db.snapshot().await?;
        let Some(sale) = find(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(None);
        };
        let (mut orders, mut events, mut payments): (Vec<OrderRow>, Vec<_>, Vec<_>) = Default::default();
        loop {
            let after = orders.last().map_or(0, |row| row.order.id.get());
            let rows = tx.rows(ROWS, args![id.get(), after, INSPECTED_AT_ONCE]).await?;
            for row in &rows {
                orders.push(read_row(row)?);
            }
            let last = orders.last().map_or(0, |row| row.order.id.get());
            read_events_in(&mut tx, id, after, last, &mut events).await?;
            read_payments_in(&mut tx, id, after, last, &mut payments).await?;
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
        let edits = read_edits(&mut tx, id).await?;
        tx.roll_back().await?;
        let mark = |(user, order): (i64, i64)| Some((UserId::new(user).ok()?, OrderId::new(order).ok()?));
        let marks = |pairs: Vec<(i64, i64)>| pairs.into_iter().map(mark).collect::<Option<Vec<_>>>();
        let quarantine = marks(quarantine).ok_or_else(|| unreadable("a quarantined order"))?;
        let pending_releases = marks(pending_releases).ok_or_else(|| unreadable("a row of pending_releases"))?;
        let pending_releases = pending_releases.into_iter().map(|(_, order)| order).collect();
        Ok(Some(SaleRecords { sale, orders, events, payments, quarantine, pending_releases, stock_changes, edits }))
    }

    pub(super) async fn insert_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<CreateOutcome> {
        let SaleDraft { id, voucher, stock, window, status, payment_deadline_ms, buy_again } = draft;
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
        let insert = "INSERT INTO sale
            (id, voucher_id, price_cents, status, begin_at, end_at, total, cap, payment_deadline_ms, buy_again, created_at)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let (price, begin, end) = (price.int(0)?, window.begin.ms(), window.end.ms());
        let values = args![
            id.get(),
            voucher.get(),
            price,
            status.as_str(),
            begin,
            end,
            stock,
            stock,
            payment_deadline_ms,
            i64::from(buy_again),
            now.ms()
        ];
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
}
