//! Publishes entries that were left in the outbox, because their node died or the broker was away, and settles them once they are
//! confirmed. Any node does this for any entry: a batch that is published twice is recorded once.

use futures_util::StreamExt as _;
use stampede_core::SaleId;
use stampede_gate::redis::{Entry, EntryId};
use stampede_queue::{Batch, UnreadyReason};

use super::broker::Broker;
use crate::tier::redis::Seller;

/// Messages that wait for their confirms at once.
const CONCURRENT: usize = 16;

/// Publishes entries of one sale. Those that are not confirmed stay in the outbox.
pub(in crate::tier) async fn publish(broker: &Broker, seller: &Seller, sale: SaleId, entries: Vec<Entry>) {
    // A broker that refuses messages is tried: nothing else shows that it takes them again.
    if let Some(reason) = broker.unready_reason().filter(|reason| *reason != UnreadyReason::Rejecting) {
        tracing::debug!(%sale, %reason, "entries stay in the outbox");
        return;
    }
    // Logged. What could not be stored stays in the outbox.
    let _ = seller.remove_unreadable(&entries).await;
    let entries: Vec<Entry> = entries.into_iter().filter(|entry| entry.unreadable.is_none()).collect();
    tracing::info!(%sale, entries = entries.len(), "publishing orders that were left in the outbox");
    let publish = async |entry: Entry| {
        let Entry { id, orders, .. } = entry;
        match broker.publish(&Batch { sale, epoch: id.epoch, orders }).await {
            Ok(()) => Some(id),
            Err(error) => {
                tracing::debug!(%sale, entry = %id, %error, "an entry stays in the outbox");
                None
            }
        }
    };
    let confirmed: Vec<Option<EntryId>> =
        futures_util::stream::iter(entries).map(publish).buffer_unordered(CONCURRENT).collect().await;
    let confirmed: Vec<EntryId> = confirmed.into_iter().flatten().collect();
    seller.settle_now(&confirmed).await;
}
