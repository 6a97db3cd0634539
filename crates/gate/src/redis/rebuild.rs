//! What a rebuild of the gate does, under its own incarnation.
//!
//! Another task of this node may follow the ledger to a later incarnation while a rebuild goes on. The calls of the rebuild then fail instead
//! of being made under the later one, which would open or close sales of another rebuild.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{GateError, LoadedSale};
use stampede_core::{Epoch, SaleId};

use super::calls::gate_error;
use super::incarnation::Incarnation;
use super::{GROUP, RedisGate};

/// What a rebuild is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RebuildStage {
    /// All sales are being rebuilt.
    All,
    /// Sales that could not be rebuilt with the others are tried again.
    Rest,
}

impl RedisGate {
    /// The current incarnation, if it is this one.
    fn expect_current(&self, incarnation: u64) -> Result<Arc<Incarnation>, GateError> {
        let current = self.current();
        if current.number == incarnation { Ok(current) } else { Err(GateError::Lost) }
    }

    /// Loads the scripts of this incarnation. Only a rebuild does this.
    ///
    /// # Errors
    /// [`GateError::Lost`] if another incarnation is current.
    pub async fn load_scripts(&self, incarnation: u64) -> Result<(), GateError> {
        for script in self.expect_current(incarnation)?.scripts.all() {
            self.answered(self.client.script_load(script).await).map_err(|error| gate_error(&error))?;
        }
        Ok(())
    }

    /// Closes a sale that has this epoch in the ledger. From then on it can only be opened under a higher one. `false` if a newer incarnation
    /// has it, or this one has opened it under a higher epoch.
    ///
    /// # Errors
    /// [`GateError::Lost`] if another incarnation is current.
    pub async fn close(&self, sale: SaleId, epoch: Epoch, incarnation: u64) -> Result<bool, GateError> {
        let current = self.expect_current(incarnation)?;
        let closed: i64 =
            self.call(&current, &current.scripts.close, &self.sale_keys(sale), &[epoch.0.to_string()]).await?;
        Ok(closed == 1)
    }

    /// Loads the marks of a sale and opens it.
    ///
    /// # Errors
    /// [`GateError::Lost`] if another incarnation is current, or a newer one or a higher epoch has the sale.
    pub async fn open_under(&self, incarnation: u64, loaded: LoadedSale) -> Result<(), GateError> {
        let current = self.expect_current(incarnation)?;
        let LoadedSale { sale, marks, ended } = loaded;
        let loading = self.key(sale.id, &format!("load:{}", sale.epoch.0));
        let loading_ended = self.key(sale.id, &format!("load-ended:{}", sale.epoch.0));
        self.load(&loading, sale.epoch, &marks).await?;
        if !sale.buy_again {
            self.load(&loading_ended, sale.epoch, &ended).await?;
        }
        let [sale_key, live, out, ended_key] = self.sale_keys(sale.id);
        let keys = [sale_key, live, out, loading, ended_key, loading_ended];
        let args = [
            sale.epoch.0.to_string(),
            marks.len().to_string(),
            sale.version.to_string(),
            sale.cap.to_string(),
            sale.window.begin.ms().to_string(),
            sale.window.end.ms().to_string(),
            sale.status.as_str().to_owned(),
            sale.price.cents().to_string(),
            GROUP.to_owned(),
            self.channel(),
            sale.id.to_string(),
            u8::from(sale.buy_again).to_string(),
            ended.len().to_string(),
        ];
        let opened: i64 = self.call(&current, &current.scripts.open, &keys, &args).await?;
        if opened < 0 {
            return Err(GateError::Lost);
        }
        let marks = u32::try_from(marks.len()).unwrap_or(u32::MAX);
        current.adopt(sale.id, sale.epoch, sale.cap.saturating_sub(marks));
        Ok(())
    }

    /// Notes that all sales are compared with the ledger now. `false` if a node has noted it less than `interval` ago.
    pub async fn begin_reconcile(&self, interval: Duration) -> Result<bool, GateError> {
        let mut command = redis::cmd("SET");
        command.arg(self.reconciled_key()).arg(1).arg("NX").arg("PX").arg(interval.as_millis().max(1).to_string());
        let noted: Option<String> = self.send(command).await?;
        Ok(noted.is_some())
    }

    /// Notes that a rebuild goes on.
    pub async fn beat(&self, stage: RebuildStage) -> Result<(), GateError> {
        let mut command = redis::cmd("INCR");
        command.arg(self.heartbeat_key(stage));
        let _beats: i64 = self.send(command).await?;
        Ok(())
    }

    /// Rises while a rebuild is in this stage, on whichever node.
    pub async fn heartbeat(&self, stage: RebuildStage) -> Result<i64, GateError> {
        let mut command = redis::cmd("GET");
        command.arg(self.heartbeat_key(stage));
        let beats: Option<i64> = self.send(command).await?;
        Ok(beats.unwrap_or_default())
    }
}
