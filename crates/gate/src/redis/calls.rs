//! Calls of scripts and commands, and what their errors mean.

use std::sync::atomic::Ordering;

use redis::{FromRedisValue, Value};
use stampede_core::ports::GateError;
use stampede_redis::{CommandError, EvalShaError, Script};

use super::RedisGate;
use super::incarnation::Incarnation;

impl RedisGate {
    pub(super) async fn call<T: FromRedisValue>(
        &self,
        incarnation: &Incarnation,
        script: &Script,
        keys: &[String],
        args: &[String],
    ) -> Result<T, GateError> {
        let verified = incarnation.verified_connection.load(Ordering::Relaxed);
        if self.client.current_connection() != Some(verified) {
            self.verify(incarnation).await?;
        }
        let reply = self.client.eval_sha(script, keys, args).await;
        match &reply {
            Err(EvalShaError::Command(CommandError::NotSent(_) | CommandError::Unknown(_))) => {
                self.breaker.unanswered();
            }
            _ => self.breaker.answered(),
        }
        let reply = reply.map_err(|error| match error {
            EvalShaError::NoScript => GateError::Lost,
            EvalShaError::Command(error) => gate_error(&error),
        })?;
        if matches!(&reply, Value::BulkString(text) if text == b"lost") {
            return Err(GateError::Lost);
        }
        read(reply)
    }

    pub(super) async fn send<T: FromRedisValue>(&self, command: redis::Cmd) -> Result<T, GateError> {
        read(self.query(command).await.map_err(|error| gate_error(&error))?)
    }

    /// Sends a command that is about the server, not about a sale.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub async fn query(&self, command: redis::Cmd) -> Result<Value, CommandError> {
        self.answered(self.client.send(command).await)
    }

    /// Notes whether Redis has answered.
    pub(super) fn answered<T>(&self, reply: Result<T, CommandError>) -> Result<T, CommandError> {
        match &reply {
            Err(CommandError::NotSent(_) | CommandError::Unknown(_)) => self.breaker.unanswered(),
            Ok(_) | Err(CommandError::Refused(_)) => self.breaker.answered(),
        }
        reply
    }
}

fn read<T: FromRedisValue>(reply: Value) -> Result<T, GateError> {
    T::from_redis_value(reply).map_err(|error| {
        tracing::error!(%error, "the gate returned an unexpected reply");
        GateError::Unanswered
    })
}

/// Whether a key has another type, or lacks a field, that the gate's scripts have written.
fn is_damaged(error: &redis::RedisError) -> bool {
    // The texts of Redis 7.0 and of later versions if the user lacks a right.
    const NO_RIGHT: [&str; 2] = ["The user executing the script can't", "ACL failure"];
    let is_failed_script = || {
        let text = error.to_string();
        text.contains("user_script") && !NO_RIGHT.iter().any(|reason| text.contains(reason))
    };
    match error.code() {
        Some("WRONGTYPE") => true,
        Some("ERR") => is_failed_script(),
        _ => false,
    }
}

pub(super) fn gate_error(error: &CommandError) -> GateError {
    match error {
        CommandError::NotSent(_) => GateError::NotSent,
        CommandError::Unknown(_) => GateError::Unanswered,
        CommandError::Refused(error) if is_damaged(error) => {
            tracing::error!(%error, "keys of the gate in Redis are damaged: another program has written to them");
            GateError::Damaged
        }
        // A script that fails half-way may have written.
        CommandError::Refused(error) => {
            tracing::error!(%error, "the gate refused a command");
            GateError::Unanswered
        }
    }
}
