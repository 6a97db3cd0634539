//! The keys in Redis.
//!
//! | key | type | holds | written by | deleted by |
//! |---|---|---|---|---|
//! | `stampede:L:{S}:sale` | hash | inc (incarnation), epoch, ver (version), state, cap, begin, end, price, hw (highest time seen), seq, gen, pending (orders in the outbox), again (whether users may buy again) | all scripts | `remove` |
//! | `stampede:L:{S}:live` | hash | `#epoch`, and user → order: the marks | `admit`, `release`, `open` | `remove` |
//! | `stampede:L:{S}:ended` | hash | `#epoch`, and user → order that has ended; only in sales in which nobody may buy again | `release`, `open` | `remove` |
//! | `stampede:L:{S}:out` | stream | the outbox: an entry `epoch-seq` per admitted batch | `admit`, `settle`, `open` | `remove` |
//! | `stampede:L:dead` | stream | entries of outboxes that cannot be read | `store_dead` | an operator, or beyond about 10,000 |
//! | `stampede:L:{S}:load:E`, `…:load-ended:E` | hash | marks and ended orders that are being loaded for epoch E | `load` | renamed by `open`, or expires |
//! | `stampede:L:{marker:N}:P` | string | nothing; the marker of the comparison N has come through partition P of the queue | the consumer of P | expires |
//! | `stampede:L:writable` | string | nothing; written to find out whether Redis accepts writes | every node | expires |
//! | `stampede:L:rebuild` | string | a number that rises while all sales are being rebuilt | the node that rebuilds | nothing |
//! | `stampede:L:rebuild-rest` | string | a number that rises while sales are tried again that could not be rebuilt with the others | the node that rebuilds | nothing |
//! | `stampede:L:reconciled` | string | nothing; all sales were compared with the ledger in the present interval | the node that compares them | expires |
//!
//! `L` is the id of the ledger, so that two installations on one Redis do not meet; `S` is the sale. Ids are strings in the scripts,
//! because numbers in Lua lose 63-bit integers.

use stampede_core::SaleId;

use super::RedisGate;
use super::rebuild::RebuildStage;

impl RedisGate {
    /// The keys of one sale that stay while it is in the gate.
    pub(super) fn sale_keys(&self, sale: SaleId) -> [String; 4] {
        ["sale", "live", "out", "ended"].map(|part| self.key(sale, part))
    }

    /// A key of one sale.
    pub(super) fn key(&self, sale: SaleId, part: &str) -> String {
        format!("stampede:{}:{{{sale}}}:{part}", self.ledger)
    }

    pub(super) fn dead_letters_key(&self) -> String {
        format!("stampede:{}:dead", self.ledger)
    }

    pub(super) fn heartbeat_key(&self, stage: RebuildStage) -> String {
        let name = match stage {
            RebuildStage::All => "rebuild",
            RebuildStage::Rest => "rebuild-rest",
        };
        format!("stampede:{}:{name}", self.ledger)
    }

    pub(super) fn marker_key(&self, id: u64, partition: u16) -> String {
        format!("stampede:{}:{{marker:{id}}}:{partition}", self.ledger)
    }

    pub(super) fn reconciled_key(&self) -> String {
        format!("stampede:{}:reconciled", self.ledger)
    }

    pub(super) fn writable_key(&self) -> String {
        format!("stampede:{}:writable", self.ledger)
    }
}
