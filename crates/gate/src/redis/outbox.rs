//! The outbox: the admitted orders that the ledger may not have yet.

use std::fmt;
use std::str::FromStr;

use stampede_core::ports::{Admitted, GateError};
use stampede_core::{Epoch, SaleId, Timestamp};

use super::{GROUP, RedisGate};

/// The id and the fields of an entry, as Redis returns them. Another program may have written any bytes.
pub(super) type Row = (String, Vec<Vec<u8>>);

/// An entry of an outbox: a batch of orders that were admitted together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub id: EntryId,
    pub orders: Vec<Admitted>,
    /// The fields of an entry that cannot be read; it has no orders then.
    pub unreadable: Option<Vec<Vec<u8>>>,
}

/// Names an entry of a sale's outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryId {
    pub epoch: Epoch,
    /// The sequence number of the last order of the entry.
    pub last_seq: i64,
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.epoch.0, self.last_seq)
    }
}

impl EntryId {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (epoch, last_seq) = text.split_once('-')?;
        Some(Self { epoch: Epoch(epoch.parse().ok()?), last_seq: last_seq.parse().ok()? })
    }
}

impl RedisGate {
    /// Removes entries whose orders the ledger has. With `announce`, nodes are told that orders of the sale were recorded.
    pub async fn settle_entries(&self, sale: SaleId, entries: &[EntryId], announce: bool) -> Result<(), GateError> {
        let channel = if announce { self.channel() } else { String::new() };
        let mut args = vec![GROUP.to_owned(), channel, sale.to_string()];
        args.extend(entries.iter().map(EntryId::to_string));
        let current = self.current();
        let keys = [self.key(sale, "sale"), self.key(sale, "out")];
        let _orders: i64 = self.call(&current, &current.scripts.settle, &keys, &args).await?;
        Ok(())
    }

    /// The entries of the outbox after this one, oldest first, at most `limit`.
    pub async fn entries(&self, sale: SaleId, after: Option<EntryId>, limit: usize) -> Result<Vec<Entry>, GateError> {
        let from = after.map_or_else(|| "-".to_owned(), |after| format!("({after}"));
        let mut command = redis::cmd("XRANGE");
        command.arg(self.key(sale, "out")).arg(from).arg("+").arg("COUNT").arg(limit);
        let rows: Vec<Row> = self.send(command).await?;
        Ok(parse_rows(sale, &rows))
    }
}

/// The entries of a stream. One that cannot be read has no orders.
pub(super) fn parse_rows(sale: SaleId, rows: &[Row]) -> Vec<Entry> {
    let entry = |(id, fields): &Row| {
        parse_entry(id, fields).or_else(|| {
            tracing::error!(%sale, id, "an entry of the outbox cannot be read");
            let unreadable = Some(fields.clone());
            EntryId::parse(id).map(|id| Entry { id, orders: Vec::new(), unreadable })
        })
    };
    rows.iter().filter_map(entry).collect()
}

pub(super) fn parse_entry(id: &str, fields: &[Vec<u8>]) -> Option<Entry> {
    let [_, first, _, at, orders @ ..] = fields else { return None };
    let (first, at): (i64, i64) = (parse(first)?, parse(at)?);
    let order = |(n, pair): (i64, &[Vec<u8>])| {
        let [user, order] = pair else { return None };
        let seq = first.checked_add(n)?;
        Some(Admitted { order: parse(order)?, user: parse(user)?, seq, at: Timestamp::from_ms(at) })
    };
    let orders = (0..).zip(orders.chunks(2)).map(order).collect::<Option<Vec<_>>>()?;
    Some(Entry { id: EntryId::parse(id)?, orders, unreadable: None })
}

fn parse<T: FromStr>(field: &[u8]) -> Option<T> {
    std::str::from_utf8(field).ok()?.parse().ok()
}
