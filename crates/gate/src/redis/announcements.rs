//! Messages to all nodes.

use stampede_core::SaleId;
use stampede_core::ports::GateError;

use super::RedisGate;

impl RedisGate {
    /// The channel on which nodes listen: a message is a word and the sale's id, perhaps followed by more. `reset` and `changed`: the sale
    /// has changed; `soldout`: nothing is left; `recorded`: orders of it were recorded.
    pub fn channel(&self) -> String {
        format!("stampede:{}:sales", self.ledger)
    }

    /// Tells all nodes that the sale has changed in the ledger.
    pub async fn announce(&self, sale: SaleId) -> Result<(), GateError> {
        self.publish("changed", sale).await
    }

    /// Tells all nodes that orders of the sale were recorded.
    pub async fn announce_recorded(&self, sale: SaleId) -> Result<(), GateError> {
        self.publish("recorded", sale).await
    }

    async fn publish(&self, word: &str, sale: SaleId) -> Result<(), GateError> {
        let mut command = redis::cmd("PUBLISH");
        command.arg(self.channel()).arg(format!("{word} {sale}"));
        let _receivers: i64 = self.send(command).await?;
        Ok(())
    }
}
