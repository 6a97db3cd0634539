//! The keys in Redis.
//!
//! | key | type | holds | written by | deleted by |
//! |---|---|---|---|---|
//! | `stampede:L:{S}:sale` | hash | inc (incarnation), epoch, ver (version), state, cap, begin, end, price, hw (highest time seen), seq, gen, pending (orders in the outbox) | all scripts | `remove` |
//! | `stampede:L:{S}:live` | hash | `#epoch`, and user → order: the marks | `admit`, `release`, `open` | `remove` |
//! | `stampede:L:{S}:out` | stream | the outbox: an entry `epoch-seq` per admitted batch | `admit`, `settle`, `open` | `remove` |
//! | `stampede:L:dead` | stream | entries of outboxes that cannot be read | `store_dead` | an operator, or beyond about 10,000 |
//! | `stampede:L:{S}:load:E` | hash | marks that are being loaded for epoch E | `load` | renamed by `open`, or expires |
//! | `stampede:L:writable` | string | nothing; written to find out whether Redis accepts writes | every node | expires |
//! | `stampede:L:rebuild` | string | a number that rises while a rebuild goes on | the node that rebuilds | nothing |
//!
//! `L` is the id of the ledger, so that two installations on one Redis do not meet; `S` is the sale. Ids are strings in the scripts,
//! because numbers in Lua lose 63-bit integers.

use stampede_core::SaleId;

use super::RedisGate;

impl RedisGate {
    /// A key of one sale.
    pub(super) fn key(&self, sale: SaleId, part: &str) -> String {
        format!("stampede:{}:{{{sale}}}:{part}", self.ledger)
    }

    pub(super) fn dead_letters_key(&self) -> String {
        format!("stampede:{}:dead", self.ledger)
    }

    pub(super) fn heartbeat_key(&self) -> String {
        format!("stampede:{}:rebuild", self.ledger)
    }

    pub(super) fn writable_key(&self) -> String {
        format!("stampede:{}:writable", self.ledger)
    }
}
