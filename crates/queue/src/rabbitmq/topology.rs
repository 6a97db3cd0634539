//! Exchange and queues in RabbitMQ. Every publisher and consumer declares them when it connects; what exists already stays as it is.
//!
//! | name | what | arguments |
//! |---|---|---|
//! | `stampede.L` | durable direct exchange | |
//! | `stampede.L.orders.N` | durable queue of partition N, bound with the key `N` | `x-queue-type`, `x-single-active-consumer`; quorum queues: `x-delivery-limit` |
//! | `stampede.L.dead-letters` | durable queue, bound with the key `dead-letters` | `x-queue-type` |
//!
//! `L` is the id of the ledger, so that two installations on one broker do not meet. Nobody deletes them; when an installation is removed,
//! an operator does.
//!
//! Policies of the broker can add what arguments do not have: one that lets messages expire or limits the length of these queues loses
//! orders.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};
use stampede_core::SaleId;

use super::ConnectError;
use super::connection::broker_error;

/// Reply code of a queue or an exchange that exists with other properties.
const PRECONDITION_FAILED: u16 = 406;
/// How often a quorum queue delivers a message before it drops it. Brokers have a default of 20 from version 4 on, but a batch must be
/// delivered until it is recorded.
const DELIVERY_LIMIT: i32 = i32::MAX;
const DEAD_LETTERS: &str = "dead-letters";

/// How RabbitMQ stores the queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    /// On one node of the broker.
    #[default]
    Classic,
    /// Replicated over the nodes of a cluster: a confirmed message survives the loss of a minority of them.
    Quorum,
}

/// Where a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Partition(u16),
    DeadLetters,
}

#[derive(Debug, Clone)]
pub(super) struct Topology {
    /// Name of the exchange, and the beginning of all other names.
    exchange: String,
    partitions: u16,
    queue_type: QueueType,
}

impl Topology {
    pub(super) fn new(ledger: &str, partitions: u16, queue_type: QueueType) -> Self {
        Self { exchange: format!("stampede.{ledger}"), partitions, queue_type }
    }

    pub(super) fn partitions(&self) -> u16 {
        self.partitions
    }

    /// The partition of a sale. Ids end in a counter that often is zero, so their bits are mixed first (SplitMix64). Must not change:
    /// the messages of a sale would be divided over two queues.
    pub(super) fn partition_of(&self, sale: SaleId) -> u16 {
        let mut mixed = sale.get().cast_unsigned().wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        // The remainder is below a number of 16 bits.
        u16::try_from(mixed % u64::from(self.partitions)).unwrap_or(0)
    }

    pub(super) fn exchange(&self) -> &str {
        &self.exchange
    }

    pub(super) fn routing_key(target: Target) -> String {
        match target {
            Target::Partition(number) => number.to_string(),
            Target::DeadLetters => DEAD_LETTERS.to_owned(),
        }
    }

    pub(super) fn queue(&self, target: Target) -> String {
        match target {
            Target::Partition(number) => format!("{}.orders.{number}", self.exchange),
            Target::DeadLetters => format!("{}.{DEAD_LETTERS}", self.exchange),
        }
    }

    fn targets(&self) -> impl Iterator<Item = Target> {
        (0..self.partitions).map(Target::Partition).chain([Target::DeadLetters])
    }

    fn arguments(&self, target: Target) -> FieldTable {
        let mut arguments = FieldTable::default();
        let queue_type = match self.queue_type {
            QueueType::Classic => "classic",
            QueueType::Quorum => "quorum",
        };
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
        if matches!(target, Target::Partition(_)) {
            arguments.insert("x-single-active-consumer".into(), true.into());
            if self.queue_type == QueueType::Quorum {
                arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(DELIVERY_LIMIT));
            }
        }
        arguments
    }

    /// Declares everything.
    pub(super) async fn declare(&self, channel: &Channel) -> Result<(), ConnectError> {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let exchange = self.exchange.as_str();
        let declared =
            channel.exchange_declare(exchange.into(), ExchangeKind::Direct, options, FieldTable::default()).await;
        declared.map_err(|error| declaration_error(exchange, &error))?;
        for target in self.targets() {
            let name = self.queue(target);
            let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            let declared = channel.queue_declare(name.as_str().into(), options, self.arguments(target)).await;
            declared.map_err(|error| declaration_error(&name, &error))?;
            let key = Self::routing_key(target);
            let bound = channel
                .queue_bind(
                    name.as_str().into(),
                    exchange.into(),
                    key.into(),
                    QueueBindOptions::default(),
                    FieldTable::default(),
                )
                .await;
            bound.map_err(|error| declaration_error(&name, &error))?;
        }
        Ok(())
    }

    /// The number of messages that wait in a queue.
    pub(super) async fn count(&self, channel: &Channel, target: Target) -> lapin::Result<u64> {
        let options = QueueDeclareOptions { passive: true, durable: true, ..QueueDeclareOptions::default() };
        let queue = channel.queue_declare(self.queue(target).into(), options, FieldTable::default()).await?;
        Ok(u64::from(queue.message_count()))
    }
}

fn declaration_error(name: &str, error: &lapin::Error) -> ConnectError {
    match broker_error(error) {
        Some((PRECONDITION_FAILED, message)) => ConnectError::DeclaredOtherwise { name: name.to_owned(), message },
        _ => ConnectError::from_lapin(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sale that moved to another queue after an upgrade could be recorded in another order.
    #[test]
    fn partition_of_a_sale_does_not_change() {
        let topology = |partitions| Topology::new("l", partitions, QueueType::Classic);
        let of = |sale, partitions| topology(partitions).partition_of(SaleId::new(sale).unwrap());
        assert_eq!([1, 2, 3, 4, i64::MAX].map(|sale| of(sale, 8)), [1, 6, 5, 2, 7]);
        assert_eq!([1, 2, 3, 4, i64::MAX].map(|sale| of(sale, 1)), [0; 5]);
    }

    #[test]
    fn sales_are_spread_over_the_partitions() {
        let topology = Topology::new("l", 8, QueueType::Classic);
        let mut sales = [0; 8];
        // Ids whose low bits are equal.
        for sale in 1..=800 {
            sales[usize::from(topology.partition_of(SaleId::new(sale << 22).unwrap()))] += 1;
        }
        assert!(sales.iter().all(|&sales| (50..=150).contains(&sales)), "{sales:?}");
    }
}
