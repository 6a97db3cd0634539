//! Edits of a sale's status and window. Each has a row in `sale_edit`: so it is carried out once per request id, and it is known which
//! settings the gate may have had at any time. Changes of stock have rows of their own (`stock`).

use stampede_core::ports::{EditOutcome, LedgerError, Result, SaleEdit, SettingChange};
use stampede_core::{Sale, SaleId, SaleStatus, Timestamp, Window, WindowChange, WindowFault};

use super::{Store, unreadable};
use crate::db::{Row, Tx, args};

/// Stands for NULL in arguments: no time of a sale is before 1970.
const NO_TIME: i64 = -1;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edit {
    Status(SaleStatus),
    Window(WindowChange),
}

/// Why an edit is not legal.
enum Illegal {
    Status(SaleStatus),
    Window(WindowFault),
}

impl From<Illegal> for EditOutcome {
    fn from(illegal: Illegal) -> Self {
        match illegal {
            Illegal::Status(status) => Self::Illegal(status),
            Illegal::Window(fault) => Self::IllegalWindow(fault),
        }
    }
}

impl Edit {
    /// What is asked for, as in the columns `status`, `begin_at` and `end_at`.
    fn columns(self) -> (&'static str, i64, i64) {
        match self {
            Self::Status(status) => (status.as_str(), NO_TIME, NO_TIME),
            Self::Window(WindowChange { begin, end }) => {
                ("", begin.map_or(NO_TIME, Timestamp::ms), end.map_or(NO_TIME, Timestamp::ms))
            }
        }
    }

    /// What is replaced, as in the columns `old_status`, `old_begin_at` and `old_end_at`.
    fn old_columns(self, before: &Sale) -> (&'static str, i64, i64) {
        match self {
            Self::Status(_) => (before.status.as_str(), NO_TIME, NO_TIME),
            Self::Window(_) => ("", before.window.begin.ms(), before.window.end.ms()),
        }
    }

    /// The sale afterwards. Its version rises unless everything is already as requested.
    fn apply(self, before: &Sale, now: Timestamp) -> std::result::Result<Sale, Illegal> {
        let (status, window) = match self {
            Self::Status(status) if status == before.status || before.status.may_become(status) => {
                (status, before.window)
            }
            Self::Status(_) => return Err(Illegal::Status(before.status)),
            Self::Window(change) => (before.status, change.apply(before, now).map_err(Illegal::Window)?),
        };
        let is_change = (status, window) != (before.status, before.window);
        Ok(Sale { status, window, version: before.version + i64::from(is_change), ..before.clone() })
    }
}

/// The sale and the content of the request with this id, if it was carried out.
async fn find_request(tx: &mut Tx, request_id: &str) -> Result<Option<(i64, String, i64, i64)>> {
    let sql = "SELECT sale_id, status, begin_at, end_at FROM sale_edit WHERE request_id = ?";
    let Some(row) = tx.row(sql, args![request_id]).await? else { return Ok(None) };
    let time = |column| Ok::<_, LedgerError>(row.maybe_int(column)?.unwrap_or(NO_TIME));
    Ok(Some((row.int(0)?, row.maybe_text(1)?.unwrap_or_default(), time(2)?, time(3)?)))
}

/// Whether an edit of the status or the window has this request id.
pub(super) async fn is_used_by_edit(tx: &mut Tx, request_id: &str) -> Result<bool> {
    Ok(find_request(tx, request_id).await?.is_some())
}

/// The edits of a sale's status and window, by rising version.
pub(super) async fn read_edits(tx: &mut Tx, id: SaleId) -> Result<Vec<SaleEdit>> {
    let sql = "SELECT asked_at, applied_at, ver, status, old_status, begin_at, end_at, old_begin_at, old_end_at
        FROM sale_edit WHERE sale_id = ? ORDER BY ver, asked_at, request_id";
    tx.rows(sql, args![id.get()]).await?.iter().map(read).collect()
}

fn read(row: &Row) -> Result<SaleEdit> {
    let bad = || unreadable("an edit of a sale");
    let status = |column| {
        let text = row.maybe_text(column)?;
        text.map(|text| SaleStatus::parse(&text).ok_or_else(bad)).transpose()
    };
    let time = |column| Ok::<_, LedgerError>(row.maybe_int(column)?.map(Timestamp::from_ms));
    let change = match (status(4)?, status(3)?) {
        (Some(from), Some(to)) => SettingChange::Status { from, to },
        _ => {
            let from = Window { begin: time(7)?.ok_or_else(bad)?, end: time(8)?.ok_or_else(bad)? };
            let to = Window { begin: time(5)?.unwrap_or(from.begin), end: time(6)?.unwrap_or(from.end) };
            SettingChange::Window { from, to }
        }
    };
    let applied_at = Some(row.int(1)?).filter(|at| *at > 0).map(Timestamp::from_ms);
    Ok(SaleEdit { asked_at: Timestamp::from_ms(row.int(0)?), applied_at, version: row.int(2)?, change })
}

impl Store {
    pub(super) async fn edit_status(
        &self,
        id: SaleId,
        status: SaleStatus,
        request_id: Option<&str>,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.edit(id, Edit::Status(status), request_id, now).await
    }

    pub(super) async fn edit_window(
        &self,
        id: SaleId,
        change: WindowChange,
        request_id: &str,
        now: Timestamp,
    ) -> Result<EditOutcome> {
        self.edit(id, Edit::Window(change), Some(request_id), now).await
    }

    async fn edit(&self, id: SaleId, edit: Edit, request_id: Option<&str>, now: Timestamp) -> Result<EditOutcome> {
        let mut tx = self.db.begin().await?;
        let Some(before) = self.locked(&mut tx, id).await? else {
            tx.roll_back().await?;
            return Ok(EditOutcome::NoSuchSale);
        };
        let (mut earlier, mut is_used) = (None, false);
        if let Some(request_id) = request_id {
            earlier = find_request(&mut tx, request_id).await?;
            let of_stock = "SELECT sale_id FROM stock_change WHERE request_id = ?";
            is_used = tx.row(of_stock, args![request_id]).await?.is_some();
        }
        let (status, begin, end) = edit.columns();
        let is_same = |(sale, old_status, old_begin, old_end): &(i64, String, i64, i64)| {
            (*sale, old_status.as_str(), *old_begin, *old_end) == (id.get(), status, begin, end)
        };
        let after = match (&earlier, edit.apply(&before, now)) {
            (Some(earlier), _) if is_same(earlier) => Err(EditOutcome::Repeated(before.clone())),
            (Some(_), _) => Err(EditOutcome::RequestIdReused),
            (None, _) if is_used => Err(EditOutcome::RequestIdReused),
            (None, Err(illegal)) => Err(illegal.into()),
            (None, Ok(after)) if after == before && request_id.is_none() => Err(EditOutcome::Repeated(after)),
            (None, Ok(after)) => Ok(after),
        };
        let after = match after {
            Ok(after) => after,
            Err(outcome) => {
                tx.roll_back().await?;
                return Ok(outcome);
            }
        };

        let is_change = after.version != before.version;
        // No request id of an operator has a space.
        let internal_id = format!("edit {id} {} {}", after.version, now.ms());
        let (old_status, old_begin, old_end) = edit.old_columns(&before);
        // A request that changes nothing is noted as well: repeated after another edit, it must not change anything either.
        let applied_at = if is_change { 0 } else { now.ms() };
        let insert = "INSERT INTO sale_edit (request_id, sale_id, asked_at, applied_at, ver, status, begin_at, end_at,
                old_status, old_begin_at, old_end_at)
            VALUES (?, ?, ?, ?, ?, NULLIF(?, ''), NULLIF(?, -1), NULLIF(?, -1), NULLIF(?, ''), NULLIF(?, -1), NULLIF(?, -1))";
        let values = args![
            request_id.unwrap_or(&internal_id),
            id.get(),
            now.ms(),
            applied_at,
            after.version,
            status,
            begin,
            end,
            old_status,
            old_begin,
            old_end
        ];
        if !tx.insert_new(insert, values).await? {
            // Another sale has used the same request id concurrently.
            tx.roll_back().await?;
            return Ok(EditOutcome::RequestIdReused);
        }
        if is_change {
            let update = "UPDATE sale SET status = ?, begin_at = ?, end_at = ?, ver = ? WHERE id = ?";
            let Window { begin, end } = after.window;
            let values = args![after.status.as_str(), begin.ms(), end.ms(), after.version, id.get()];
            tx.execute(update, values).await?;
        }
        tx.commit().await?;
        Ok(if is_change { EditOutcome::Done { before, after } } else { EditOutcome::Repeated(after) })
    }

    pub(super) async fn read_sales_with_pending_edits(&self, limit: u32) -> Result<Vec<SaleId>> {
        let sql = "SELECT DISTINCT sale_id FROM sale_edit WHERE applied_at = 0 ORDER BY sale_id LIMIT ?";
        let rows = self.db.rows(sql, args![limit]).await?;
        rows.iter().map(|row| SaleId::new(row.int(0)?).map_err(|_| unreadable("an edit of a sale"))).collect()
    }

    pub(super) async fn set_applied(&self, id: SaleId, version: i64, now: Timestamp) -> Result<()> {
        let update = "UPDATE sale_edit SET applied_at = ? WHERE sale_id = ? AND ver <= ? AND applied_at = 0";
        self.db.execute(update, args![now.ms(), id.get(), version]).await
    }
}
