//! Watches the ledger's sales: another process may have edited one, made one, or taken an order back; or we may have been cut
//! short between the ledger and the gate. Also puts away what is long over.

use std::collections::HashMap;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use stampede_core::ports::Result;
use stampede_core::{Sale, SaleId};

use crate::commit::describe;
use crate::engine::Engine;

pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What the ledger and the gate say that is sold, where they differ.
type Difference = (u32, u32);

/// Ends with its engine.
pub(crate) async fn keep(engine: Weak<Engine>, shared_ledger: bool) {
    let mut turns = tokio::time::interval(LOOK_EVERY);
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen = HashMap::new();
    loop {
        turns.tick().await;
        let Some(engine) = engine.upgrade() else { return };
        if let Err(error) = look(&engine, shared_ledger, &mut seen).await {
            tracing::warn!(error = describe(&error), "cannot look at the sales; trying again");
        }
    }
}

async fn look(engine: &Engine, shared_ledger: bool, seen: &mut HashMap<SaleId, Difference>) -> Result<()> {
    if shared_ledger {
        let has_others = engine.stores.ledger.has_other_workers(&engine.holder).await?;
        engine.has_others.store(has_others, Ordering::Relaxed);
    }
    let mut differences = HashMap::new();
    for sale in engine.stores.ledger.sales().await? {
        engine.shelf.put(sale.clone());
        if engine.is_long_over(&sale) {
            if engine.gate.remove(sale.id) {
                engine.solo.retire(sale.id).await;
            }
            continue;
        }
        let Some(snapshot) = engine.gate.snapshot(sale.id) else {
            open(engine, &sale).await?;
            continue;
        };
        engine.gate.edit(&sale);
        // Orders on their way are counted here and not there; and what was put in quarantine stays counted here alone. So only a
        // difference at rest counts, seen twice, and each is looked into once.
        let at_rest = snapshot.marks == snapshot.settled;
        let difference = (sale.sold, snapshot.settled);
        if at_rest && sale.sold != snapshot.settled {
            if seen.get(&sale.id) == Some(&difference) {
                engine.solo.refresh(sale.id).await;
            }
            differences.insert(sale.id, difference);
        }
    }
    *seen = differences;
    Ok(())
}

/// A sale that another process made, or that could not be opened when it was made here.
async fn open(engine: &Engine, sale: &Sale) -> Result<()> {
    if let Some(loaded) = engine.stores.ledger.load(sale.id).await? {
        engine.gate.open(loaded);
    }
    Ok(())
}
