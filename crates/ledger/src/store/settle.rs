//! The slow way of `record`: what becomes of each order, decided from what the ledger holds.

use std::collections::HashMap;

use stampede_core::ports::{Admitted, Recorded};
use stampede_core::{Epoch, OrderId, RejectReason, SaleId, UserId};

/// A row that has one of the batch's ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) sale: SaleId,
    pub(crate) user: UserId,
    pub(crate) live: bool,
}

/// What was read under the lock of the sale's row.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) epoch: Epoch,
    /// total − sold
    pub(crate) room: u32,
    pub(crate) rows: HashMap<OrderId, Row>,
    /// The live orders of the batch's users in this sale.
    pub(crate) live: HashMap<UserId, OrderId>,
}

/// One answer per order, in the order of the batch. Who came first (by `seq`) gets what is left.
pub(crate) fn settle(sale: SaleId, epoch: Epoch, batch: &[Admitted], mut found: Found) -> Vec<Recorded> {
    let mut turns: Vec<usize> = (0..batch.len()).collect();
    turns.sort_by_key(|&i| (batch[i].seq, batch[i].order));
    let mut answers = vec![Recorded::IdCollision; batch.len()];
    for i in turns {
        let Admitted { order, user, .. } = batch[i];
        answers[i] = match found.rows.get(&order) {
            Some(row) if row.sale != sale || row.user != user => Recorded::IdCollision,
            Some(row) if row.live => Recorded::Already,
            Some(_) => Recorded::Dead,
            None => {
                let answer = match found.live.get(&user) {
                    Some(&keep) => Recorded::Refused { reason: RejectReason::AlreadyHas, keep: Some(keep) },
                    None if epoch != found.epoch => Recorded::Refused { reason: RejectReason::Epoch, keep: None },
                    None if found.room == 0 => Recorded::Refused { reason: RejectReason::SoldOut, keep: None },
                    None => Recorded::Recorded,
                };
                let live = answer == Recorded::Recorded;
                if live {
                    found.room -= 1;
                    found.live.insert(user, order);
                }
                found.rows.insert(order, Row { sale, user, live });
                answer
            }
        };
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use stampede_core::Timestamp;
    use std::collections::HashSet;

    proptest! {
        /// However a batch is mixed: no more than there is room, one live order a person, one decision an id.
        #[test]
        fn keeps_the_fences(
            batch in proptest::collection::vec((1..12i64, 1..8i64, 0..20i64), 0..24),
            rows in proptest::collection::vec((1..12i64, 1..8i64, any::<bool>()), 0..6),
            room in 0..6u32,
            same_epoch in any::<bool>(),
        ) {
            let sale = SaleId::new(1).unwrap();
            let order = |n| OrderId::new(n).unwrap();
            let user = |n| UserId::new(n).unwrap();
            let mut found = Found { epoch: Epoch(1), room, rows: HashMap::new(), live: HashMap::new() };
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
            let answers = settle(sale, epoch, &batch, found);
            prop_assert_eq!(answers.len(), batch.len());

            let (mut sold, mut ids) = (0, HashSet::new());
            let mut owners: HashSet<UserId> = before.keys().copied().collect();
            for (item, answer) in batch.iter().zip(&answers) {
                match answer {
                    Recorded::Recorded => {
                        sold += 1;
                        prop_assert!(same_epoch);
                        prop_assert!(ids.insert(item.order), "an id is recorded once");
                        prop_assert!(owners.insert(item.user), "one live order a person");
                    }
                    Recorded::Refused { keep, .. } => {
                        if let Some(keep) = keep { prop_assert!(*keep != item.order); }
                    }
                    Recorded::Already | Recorded::Dead | Recorded::IdCollision => {}
                }
            }
            prop_assert!(sold <= room);
        }
    }
}
