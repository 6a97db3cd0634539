//! What a rebuild of the gate does before it opens the sales.

use stampede_core::ports::GateError;
use stampede_core::{Epoch, SaleId};

use super::RedisGate;
use super::calls::gate_error;

impl RedisGate {
    /// Loads the scripts of this incarnation. Only a rebuild does this.
    pub async fn load_scripts(&self) -> Result<(), GateError> {
        for script in self.current().scripts.all() {
            self.answered(self.client.script_load(script).await).map_err(|error| gate_error(&error))?;
        }
        Ok(())
    }

    /// Closes a sale at the beginning of a rebuild. `false` if a newer incarnation has it.
    pub async fn close(&self, sale: SaleId, epoch: Epoch) -> Result<bool, GateError> {
        let current = self.current();
        let keys = [self.key(sale, "sale"), self.key(sale, "live"), self.key(sale, "out")];
        let closed: i64 = self.call(&current, &current.scripts.close, &keys, &[epoch.0.to_string()]).await?;
        Ok(closed == 1)
    }

    /// Notes that a rebuild goes on.
    pub async fn beat(&self) -> Result<(), GateError> {
        let mut command = redis::cmd("INCR");
        command.arg(self.heartbeat_key());
        let _beats: i64 = self.send(command).await?;
        Ok(())
    }

    /// Rises while a rebuild goes on, on whichever node.
    pub async fn heartbeat(&self) -> Result<i64, GateError> {
        let mut command = redis::cmd("GET");
        command.arg(self.heartbeat_key());
        let beats: Option<i64> = self.send(command).await?;
        Ok(beats.unwrap_or_default())
    }
}
