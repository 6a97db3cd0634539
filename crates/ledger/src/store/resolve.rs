//! The slow path of `record`: decides the outcome of each order from the existing rows.

use std::collections::{HashMap, HashSet};

use stampede_core::ports::{Admitted, RecordOutcome};
use stampede_core::{Epoch, OrderId, RejectReason, SaleId, UserId};

/// An existing row with one of the batch's ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) sale: SaleId,
    pub(crate) user: UserId,
    pub(crate) live: bool,
}

/// The rows that were read under the lock of the sale's row.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) epoch: Epoch,
    /// total − sold
    pub(crate) room: u32,
    pub(crate) rows: HashMap<OrderId, Row>,
    /// The live orders of the batch's users in this sale.
    pub(crate) live: HashMap<UserId, OrderId>,
    /// The batch's users who may not buy again in this sale.
    pub(crate) ended: HashSet<UserId>,
    /// The batch's ids that are in quarantine, with their users.
    pub(crate) quarantined: HashMap<OrderId, (SaleId, UserId)>,
    /// The sale's orders are being copied to the index by user, or have been: new orders are added to it at once.
    pub(crate) indexed: bool,
}

impl Found {
    /// The outcome by an existing row with the same id.
    pub(crate) fn by_row(&self, sale: SaleId, Admitted { order, user, .. }: &Admitted) -> Option<RecordOutcome> {
        self.rows.get(order).map(|row| match row {
            row if row.sale != sale || row.user != *user => RecordOutcome::IdCollision,
            row if row.live => RecordOutcome::AlreadyRecorded,
            _ => RecordOutcome::Dead,
        })
    }

    /// The outcome by an existing quarantine entry.
    pub(crate) fn by_quarantine(&self, sale: SaleId, Admitted { order, user, .. }: &Admitted) -> Option<RecordOutcome> {
        let same = *self.quarantined.get(order)? == (sale, *user);
        Some(if same { RecordOutcome::Quarantined } else { RecordOutcome::IdCollision })
    }
}

/// Returns one outcome per order, in the order of the batch. The remaining stock goes to the lowest `seq` first.
pub(crate) fn resolve(sale: SaleId, epoch: Epoch, batch: &[Admitted], found: &mut Found) -> Vec<RecordOutcome> {
    let mut by_seq: Vec<usize> = (0..batch.len()).collect();
    by_seq.sort_by_key(|&i| (batch[i].seq, batch[i].order));
    let mut outcomes = vec![RecordOutcome::IdCollision; batch.len()];
    for i in by_seq {
        let Admitted { order, user, .. } = batch[i];
        outcomes[i] = match found.by_row(sale, &batch[i]).or_else(|| found.by_quarantine(sale, &batch[i])) {
            Some(known) => known,
            None => {
                let outcome = match found.live.get(&user) {
                    Some(&existing) => {
                        RecordOutcome::Rejected { reason: RejectReason::AlreadyHas, existing: Some(existing) }
                    }
                    None if epoch != found.epoch => {
                        RecordOutcome::Rejected { reason: RejectReason::Epoch, existing: None }
                    }
                    None if found.ended.contains(&user) => {
                        RecordOutcome::Rejected { reason: RejectReason::BoughtBefore, existing: None }
                    }
                    None if found.room == 0 => {
                        RecordOutcome::Rejected { reason: RejectReason::SoldOut, existing: None }
                    }
                    None => RecordOutcome::Inserted,
                };
                let live = outcome == RecordOutcome::Inserted;
                if live {
                    found.room -= 1;
                    found.live.insert(user, order);
                }
                found.rows.insert(order, Row { sale, user, live });
                outcome
            }
        };
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stampede_core::Timestamp;
    use std::collections::HashSet;

    proptest! {
        /// For any batch: no more orders than stock, one live order per user, one outcome per id.
        #[test]
        fn never_oversells_or_duplicates(
            batch in proptest::collection::vec((1..12i64, 1..8i64, 0..20i64), 0..24),
            rows in proptest::collection::vec((1..12i64, 1..8i64, any::<bool>()), 0..6),
            ended in proptest::collection::hash_set(1..8i64, 0..3),
            quarantined in proptest::collection::hash_set(1..12i64, 0..3),
            room in 0..6u32,
            same_epoch in any::<bool>(),
        ) {
            let sale = SaleId::new(1).unwrap();
            let order = |n| OrderId::new(n).unwrap();
            let user = |n| UserId::new(n).unwrap();
            let mut found = Found {
                epoch: Epoch(1),
                room,
                rows: HashMap::new(),
                live: HashMap::new(),
                ended: ended.iter().map(|&u| user(u)).collect(),
                quarantined: quarantined.iter().map(|&o| (order(o), (sale, user(1)))).collect(),
                indexed: false,
            };
            for (o, u, live) in rows {
                let live = live && !found.live.contains_key(&user(u)) && !found.rows.contains_key(&order(o));
                if live { found.live.insert(user(u), order(o)); }
                found.rows.entry(order(o)).or_insert(Row { sale, user: user(u), live });
            }
            let before = found.live.clone();
            let batch: Vec<Admitted> = batch.into_iter()
                .map(|(o, u, seq)| Admitted { order: order(o), user: user(u), seq, at: Timestamp::from_ms(0) })
                .collect();
            let epoch = if same_epoch { Epoch(1) } else { Epoch(2) };
            let outcomes = resolve(sale, epoch, &batch, &mut found);
            prop_assert_eq!(outcomes.len(), batch.len());

            let (mut sold, mut ids) = (0, HashSet::new());
            let mut owners: HashSet<UserId> = before.keys().copied().collect();
            for (item, outcome) in batch.iter().zip(&outcomes) {
                match outcome {
                    RecordOutcome::Inserted => {
                        sold += 1;
                        prop_assert!(same_epoch);
                        prop_assert!(ids.insert(item.order), "an id is recorded once");
                        prop_assert!(owners.insert(item.user), "one live order per user");
                    }
                    RecordOutcome::Rejected { existing, .. } => {
                        if let Some(existing) = existing { prop_assert!(*existing != item.order); }
                    }
                    RecordOutcome::Quarantined => {
                        prop_assert!(quarantined.contains(&item.order.get()) && item.user == user(1));
                    }
                    RecordOutcome::AlreadyRecorded | RecordOutcome::Dead | RecordOutcome::IdCollision => {}
                }
                prop_assert!(*outcome != RecordOutcome::Inserted || !quarantined.contains(&item.order.get()));
            }
            prop_assert!(sold <= room);
        }
    }
}
