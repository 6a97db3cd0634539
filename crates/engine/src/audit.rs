//! What administrators do is written down: before it is done, and what came of it.

use stampede_core::Code;
use stampede_core::ids::IdMaker as _;
use stampede_core::ports::AuditEntry;

use crate::commit::describe;
use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    /// Does `work` in the name of `actor`. What cannot be written down is not done.
    pub async fn audited<T>(
        &self,
        actor: &str,
        action: &str,
        target: &str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let note = async |outcome: &str| -> Result<(), Error> {
            let (id, at) = (self.ids.next()?, self.clock.now());
            let [actor, action, target, outcome] = [actor, action, target, outcome].map(str::to_owned);
            Ok(self.stores.ledger.audit(&AuditEntry { id, at, actor, action, target, outcome }).await?)
        };
        note("asked").await?;
        let done = work.await;
        let outcome = done.as_ref().map_or_else(|error| error.code().as_str(), |_| "done");
        if let Err(error) = note(outcome).await {
            // It is done, and that it was asked for is on record; this says the rest.
            tracing::error!(actor, action, target, outcome, error = describe(&error), "the audit log lacks an outcome");
        }
        done
    }

    /// The audit log, newest first, entries below `before`.
    pub async fn audit_log(&self, before: Option<i64>, limit: u32) -> Result<Vec<AuditEntry>, Error> {
        if before.is_some_and(|before| before <= 0) {
            return Err(Error::Plain(Code::InvalidRequest));
        }
        Ok(self.stores.ledger.audit_log(before, limit).await?)
    }
}
