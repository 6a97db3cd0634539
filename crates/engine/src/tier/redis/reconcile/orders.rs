//! Compares the orders of one sale with its marks.

use std::collections::{HashMap, HashSet};

use stampede_core::ports::{Ledger, LedgerError};
use stampede_core::{Epoch, Order, OrderId, SaleId, UserId};

use super::Finding;

/// Orders that are read at once.
const ORDERS: u32 = 10_000;
/// Orders in quarantine that are read at once.
const QUARANTINED: u32 = 1000;

/// The orders of a sale that are in quarantine.
pub(super) async fn quarantined(ledger: &dyn Ledger, sale: SaleId) -> Result<Vec<OrderId>, LedgerError> {
    let mut orders = Vec::new();
    if ledger.quarantined_sales().await?.iter().all(|(other, _)| *other != sale) {
        return Ok(orders);
    }
    let mut before = None;
    loop {
        let page = ledger.quarantined(before, QUARANTINED).await?;
        let Some(last) = page.last() else { return Ok(orders) };
        before = Some(last.admitted.order);
        orders.extend(page.iter().filter(|item| item.sale == sale).map(|item| item.admitted.order));
    }
}

/// Compares the orders of a sale with its marks, which were read before. The orders are read in pages, because there may be millions.
pub(super) async fn compare(
    ledger: &dyn Ledger,
    sale: SaleId,
    epoch: Epoch,
    mut marks: Vec<(UserId, OrderId)>,
    on_their_way: &HashSet<OrderId>,
) -> Result<HashSet<Finding>, LedgerError> {
    marks.sort_unstable();
    let mut found = HashSet::new();
    let mut has_row = vec![false; marks.len()];
    let mut dead = Vec::new();
    // Live orders of users with a mark of another order.
    let mut existing = HashMap::new();
    let mut after = None;
    loop {
        let page = ledger.orders_in(sale, after, ORDERS).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.order.id);
        for Order { id, user, status, .. } in page.iter().map(|row| &row.order) {
            match (marks.binary_search_by_key(user, |(user, _)| *user), status.is_live()) {
                (Ok(n), is_live) if marks[n].1 == *id => {
                    has_row[n] = true;
                    if !is_live {
                        dead.push(marks[n]);
                    }
                }
                // Its mark is one of the other findings.
                (Ok(_), true) => _ = existing.insert(*user, *id),
                (Err(_), true) => _ = found.insert(Finding::LiveRowWithoutMark { user: *user, order: *id }),
                (_, false) => {}
            }
        }
    }
    let with_existing =
        |(user, order)| Finding::DeadRowWithMark { user, order, existing: existing.get(&user).copied() };
    found.extend(dead.into_iter().map(with_existing));
    let without_row =
        marks.iter().zip(has_row).filter(|((_, order), has_row)| !has_row && !on_their_way.contains(order));
    found.extend(without_row.map(|(&(user, order), _)| Finding::MarkWithoutRow { user, order, epoch }));
    Ok(found)
}
