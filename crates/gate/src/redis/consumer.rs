//! The outbox as a queue: consumers of one group read its entries, and settle what the ledger has.
//!
//! An entry that was read stays in the list of its consumer until it is settled, so nothing is lost with a consumer: another one claims
//! what has been in a list for too long. Claiming too early is harmless, because recording is idempotent by order id.
//!
//! Only `open` creates the stream and its group, so a missing group means that Redis has lost the outbox.

use std::collections::HashMap;
use std::time::Duration;

use redis::{FromRedisValue as _, RedisError, Value};
use stampede_core::SaleId;
use stampede_core::ports::GateError;
use stampede_redis::{Client, CommandError};

use super::calls::gate_error;
use super::outbox::{Row, parse_rows};
use super::{Entry, GROUP, RedisGate};

impl RedisGate {
    /// Reads entries that no consumer has read yet, at most `limit` of each sale. Waits for at most `wait` if there are none: then
    /// `client` must be a connection that nothing else waits for.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis does not have the outbox of one of the sales.
    pub async fn read_new(
        &self,
        client: &Client,
        consumer: &str,
        sales: &[SaleId],
        limit: usize,
        wait: Option<Duration>,
    ) -> Result<Vec<(SaleId, Vec<Entry>)>, GateError> {
        let keys: Vec<String> = sales.iter().map(|&sale| self.key(sale, "out")).collect();
        let mut command = redis::cmd("XREADGROUP");
        command.arg("GROUP").arg(GROUP).arg(consumer).arg("COUNT").arg(limit);
        if let Some(wait) = wait {
            command.arg("BLOCK").arg(wait.as_millis().max(1).to_string());
        }
        command.arg("STREAMS").arg(&keys);
        for _ in sales {
            command.arg(">");
        }
        let reply = client.send(command).await.map_err(|error| read_error(&error))?;
        let streams =
            Option::<Vec<(String, Vec<Row>)>>::from_redis_value(reply).map_err(|error| unexpected(error.into()))?;
        let read = |(key, rows): (String, Vec<Row>)| {
            let sale = keys.iter().position(|known| *known == key).map(|position| sales[position])?;
            Some((sale, parse_rows(sale, &rows)))
        };
        Ok(streams.unwrap_or_default().into_iter().filter_map(read).collect())
    }

    /// Takes over entries that another consumer, or this one, has read at least `idle` ago and not settled; at most `limit`. `cursor` is
    /// where the search goes on; it begins and ends with `0-0`.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis does not have the outbox.
    pub async fn claim(
        &self,
        sale: SaleId,
        consumer: &str,
        idle: Duration,
        limit: usize,
        cursor: &mut String,
    ) -> Result<Vec<Entry>, GateError> {
        let mut command = redis::cmd("XAUTOCLAIM");
        command.arg(self.key(sale, "out")).arg(GROUP).arg(consumer).arg(idle.as_millis().to_string());
        command.arg(cursor.as_str()).arg("COUNT").arg(limit);
        let reply = self.client.send(command).await.map_err(|error| read_error(&error))?;
        let (next, rows, _deleted) =
            <(String, Vec<Row>, Vec<String>)>::from_redis_value(reply).map_err(|error| unexpected(error.into()))?;
        *cursor = next;
        Ok(parse_rows(sale, &rows))
    }

    /// The oldest entries that were read by some consumer and are not settled, at most `limit`. Some may be in no consumer's list, so that
    /// none can claim them: another client has acknowledged them, or moved the group ahead of them.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis does not have the outbox.
    pub async fn delivered(&self, sale: SaleId, limit: usize) -> Result<Vec<Entry>, GateError> {
        let key = self.key(sale, "out");
        let mut info = redis::cmd("XINFO");
        info.arg("GROUPS").arg(&key);
        let groups: Vec<HashMap<String, Value>> = self.send(info).await?;
        let is_ours = |group: &HashMap<String, Value>| {
            group.get("name").is_some_and(|name| String::from_redis_value_ref(name).is_ok_and(|name| name == GROUP))
        };
        let group = groups.into_iter().find(is_ours).ok_or(GateError::Lost)?;
        let last = group.get("last-delivered-id").map(String::from_redis_value_ref).transpose();
        let last = last.map_err(|error| unexpected(error.into()))?.ok_or(GateError::Lost)?;
        let mut range = redis::cmd("XRANGE");
        range.arg(key).arg("-").arg(last).arg("COUNT").arg(limit);
        let rows: Vec<Row> = self.send(range).await?;
        Ok(parse_rows(sale, &rows))
    }

    /// Deletes the names of consumers that have read nothing for this long and have nothing left to settle.
    ///
    /// # Errors
    /// [`GateError::Lost`] if Redis does not have the scripts of the gate.
    pub async fn forget_consumers(&self, sale: SaleId, idle: Duration) -> Result<u32, GateError> {
        let current = self.current();
        let args = [GROUP.to_owned(), idle.as_millis().to_string()];
        self.call(&current, &current.scripts.forget_consumers, &[self.key(sale, "out")], &args).await
    }
}

/// Without the stream or its group Redis has lost the outbox.
fn read_error(error: &CommandError) -> GateError {
    match error {
        // `UNBLOCKED`: the stream was deleted while the command waited for entries.
        CommandError::Refused(refused) if matches!(refused.code(), Some("NOGROUP" | "UNBLOCKED")) => GateError::Lost,
        error => gate_error(error),
    }
}

fn unexpected(error: RedisError) -> GateError {
    gate_error(&CommandError::Unknown(error))
}
