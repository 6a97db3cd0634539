//! Entries of outboxes that cannot be read. They are moved to one stream for all sales, for operators. Their orders hold marks, from which
//! they are recorded when gate and ledger are compared.

use stampede_core::SaleId;
use stampede_core::ports::GateError;

use super::outbox::{Row, parse_entry};
use super::{Entry, RedisGate};

/// About how many are kept. The oldest are deleted first.
const MAX_KEPT: usize = 10_000;

/// An entry that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadEntry {
    /// Its id among the dead letters.
    id: String,
    sale: String,
    /// Its id in the outbox.
    entry: String,
    fields: Vec<Vec<u8>>,
}

impl DeadEntry {
    /// Everything that is known about it.
    pub fn content(&self) -> Vec<u8> {
        let mut content = format!("sale {} entry {}: ", self.sale, self.entry).into_bytes();
        content.extend(self.fields.join(&b' '));
        content
    }

    /// The entry, if this version of the program can read it.
    pub fn parse(&self) -> Option<(SaleId, Entry)> {
        Some((self.sale.parse().ok()?, parse_entry(&self.entry, &self.fields)?))
    }
}

impl RedisGate {
    /// Stores an entry that cannot be read as a dead letter. It stays in the outbox until it is settled; if that fails, it is stored
    /// twice.
    pub async fn store_dead(&self, sale: SaleId, entry: &Entry) -> Result<(), GateError> {
        let mut command = redis::cmd("XADD");
        command.arg(self.dead_letters_key()).arg("MAXLEN").arg("~").arg(MAX_KEPT).arg("*");
        command.arg("sale").arg(sale.to_string()).arg("entry").arg(entry.id.to_string());
        let fields = entry.unreadable.as_deref().unwrap_or_default();
        // A stream has pairs of fields and values.
        for pair in fields.chunks(2) {
            command.arg(&pair[0]).arg(pair.get(1).map_or(&[][..], Vec::as_slice));
        }
        let _id: String = self.send(command).await?;
        Ok(())
    }

    /// The oldest dead letters, at most `limit`.
    pub async fn dead_entries(&self, limit: usize) -> Result<Vec<DeadEntry>, GateError> {
        let mut command = redis::cmd("XRANGE");
        command.arg(self.dead_letters_key()).arg("-").arg("+").arg("COUNT").arg(limit);
        let rows: Vec<Row> = self.send(command).await?;
        let dead = |(id, fields): Row| {
            let [_, sale, _, entry, rest @ ..] = &fields[..] else { return None };
            let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
            Some(DeadEntry { id, sale: text(sale), entry: text(entry), fields: rest.to_vec() })
        };
        Ok(rows.into_iter().filter_map(dead).collect())
    }

    /// Removes a dead letter. Returns whether it was there.
    pub async fn remove_dead(&self, dead: &DeadEntry) -> Result<bool, GateError> {
        let mut command = redis::cmd("XDEL");
        command.arg(self.dead_letters_key()).arg(&dead.id);
        let removed: i64 = self.send(command).await?;
        Ok(removed == 1)
    }
}
