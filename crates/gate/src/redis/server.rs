//! What the server is like: whether it is the one on which the incarnation was opened, has the scripts, and accepts writes.

use std::sync::atomic::Ordering;

use stampede_core::ports::GateError;
use stampede_redis::CommandError;

use super::RedisGate;
use super::calls::gate_error;
use super::incarnation::Incarnation;

/// How long the key stays with which a node finds out whether Redis accepts writes.
const WRITABLE_TTL_MS: u32 = 10_000;

impl RedisGate {
    /// The number of the present connection (see [`Client::current_connection`](stampede_redis::Client::current_connection)).
    pub fn current_connection(&self) -> Option<u64> {
        self.client.current_connection()
    }

    /// The replication id of the server. It changes when the server becomes a replica and when a replica becomes the master; also when the
    /// first replica of a master is attached, and some time after the last one was detached.
    pub async fn replication_id(&self) -> Result<String, GateError> {
        let mut command = redis::cmd("INFO");
        command.arg("replication");
        let info: String = self.send(command).await?;
        let id = info.lines().find_map(|line| line.strip_prefix("master_replid:"));
        Ok(id.ok_or(GateError::Unanswered)?.trim().to_owned())
    }

    /// Checks that the server is the one on which this incarnation was opened: [`GateError::Lost`] if it is another one, or has been a
    /// replica since.
    pub async fn verify_server(&self) -> Result<(), GateError> {
        self.verify(&self.current()).await
    }

    pub(super) async fn verify(&self, incarnation: &Incarnation) -> Result<(), GateError> {
        if incarnation.replication_id.is_empty() {
            return Ok(());
        }
        // Read before the call: if the connection is replaced during the call, the new one is not verified.
        let connection = self.client.current_connection();
        let found = self.replication_id().await?;
        if found != incarnation.replication_id {
            tracing::debug!(found, expected = incarnation.replication_id, "Redis has another replication id");
            incarnation.verified_connection.store(0, Ordering::Relaxed);
            return Err(GateError::Lost);
        }
        incarnation.verified_connection.store(connection.unwrap_or_default(), Ordering::Relaxed);
        Ok(())
    }

    /// Whether Redis has the scripts of this incarnation. If not, it may have lost marks, too.
    pub async fn has_scripts(&self) -> Result<bool, GateError> {
        let mut command = redis::cmd("SCRIPT");
        command.arg("EXISTS");
        for script in self.current().scripts.all() {
            command.arg(script.hash());
        }
        let found: Vec<bool> = self.send(command).await?;
        Ok(found.into_iter().all(|found| found))
    }

    /// Why Redis refuses to write or to publish (its memory is full, its replicas are away, or the rights of its user do not suffice);
    /// `None` if it does both.
    pub async fn write_refusal(&self) -> Result<Option<String>, GateError> {
        let name = self.writable_key();
        let args = [WRITABLE_TTL_MS.to_string(), name.clone()];
        let reply = self.client.eval(&self.writable, &[name], &args).await;
        self.accepts_writes.store(reply.is_ok(), Ordering::Release);
        match reply {
            Err(error) if error.is_write_refusal() || matches!(error, CommandError::Refused(_)) => {
                self.breaker.answered();
                Ok(Some(error.to_string()))
            }
            reply => self.answered(reply).map(|_| None).map_err(|error| gate_error(&error)),
        }
    }

    /// Whether Redis wrote and published when it was last asked to.
    pub fn accepts_writes(&self) -> bool {
        self.accepts_writes.load(Ordering::Acquire)
    }
}
