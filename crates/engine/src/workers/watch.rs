//! Watches the ledger's sales: another process may have edited one, made one, or taken an order back; or we may have been cut
//! short between the ledger and the gate. Also puts away what is long over.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stampede_core::ports::Result;
use stampede_core::{Sale, SaleId};

use crate::commit::describe;
use crate::engine::Engine;
use crate::task::AbortOnDrop;

pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long after another process was last seen we still reckon with what it did.
const OTHERS_KEPT: Duration = Duration::from_secs(5);

/// What the ledger and the gate say that is sold, where they differ, and how often that was seen.
#[derive(Debug, Clone, Copy)]
struct Difference {
    sold: (u32, u32),
    times: u32,
}

/// How many orders of a sale had died by the last look, and how often the sale is still to be read because of that.
#[derive(Debug, Clone, Copy, Default)]
struct Released {
    seen: i64,
    reads_due: u32,
}

/// A read that another release overtakes is thrown away; the second one comes a look later.
const READS_AFTER_RELEASE: u32 = 2;

struct Watch {
    shared_ledger: bool,
    others_seen: Option<Instant>,
    differences: HashMap<SaleId, Difference>,
    /// An order that died elsewhere and one that was sold elsewhere leave the counts as they were.
    released: HashMap<SaleId, Released>,
    /// What may wait for an order that is being recorded runs beside the watch, so that one stuck sale does not hold up the others.
    refreshing: HashMap<SaleId, AbortOnDrop>,
    others_left: Option<AbortOnDrop>,
    retiring: Vec<AbortOnDrop>,
}

/// Ends with its engine.
pub(crate) async fn run(engine: Weak<Engine>, shared_ledger: bool) {
    let mut turns = tokio::time::interval(LOOK_EVERY);
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watch = Watch {
        shared_ledger,
        others_seen: None,
        differences: HashMap::new(),
        released: HashMap::new(),
        refreshing: HashMap::new(),
        others_left: None,
        retiring: Vec::new(),
    };
    loop {
        turns.tick().await;
        let Some(engine) = engine.upgrade() else { return };
        if let Err(error) = watch.look(&engine).await {
            tracing::warn!(error = describe(&error), "cannot look at the sales; trying again");
        }
    }
}

impl Watch {
    async fn look(&mut self, engine: &Arc<Engine>) -> Result<()> {
        self.refreshing.retain(|_, task| !task.is_finished());
        self.retiring.retain(|task| !task.is_finished());
        if self.shared_ledger {
            self.look_for_others(engine).await?;
        }
        for id in engine.gate.sales() {
            if engine.any_sale(id).is_ok_and(|view| engine.is_long_over(&view.sale)) && engine.gate.remove(id) {
                let engine = engine.clone();
                self.retiring.push(AbortOnDrop::spawn(async move { engine.solo.retire(id).await }));
            }
        }
        let (mut differences, mut released) = (HashMap::new(), HashMap::new());
        for sale in engine.stores.ledger.sales(Some(engine.kept_since())).await? {
            let id = sale.id;
            released.insert(id, self.look_for_released(engine, &sale));
            if let Some(difference) = look_at(engine, sale, self.differences.get(&id)).await? {
                if difference.times > 1 && difference.times.is_power_of_two() {
                    self.refresh(engine, id);
                }
                differences.insert(id, difference);
            }
        }
        (self.differences, self.released) = (differences, released);
        Ok(())
    }

    /// CatalogueCache the sale again if orders of it have died, when no order of it is on its way.
    fn look_for_released(&mut self, engine: &Arc<Engine>, sale: &Sale) -> Released {
        let mut released = self.released.get(&sale.id).copied().unwrap_or_default();
        if sale.released != released.seen {
            released = Released { seen: sale.released, reads_due: READS_AFTER_RELEASE };
        }
        let at_rest = engine.gate.snapshot(sale.id).is_some_and(|snapshot| snapshot.marks == snapshot.settled);
        if !engine.has_others.load(Ordering::Relaxed) {
            // Our own gate knows of every release.
            released.reads_due = 0;
        } else if released.reads_due > 0 && at_rest {
            released.reads_due -= 1;
            self.refresh(engine, sale.id);
        }
        released
    }

    /// CatalogueCache the sale again from the ledger, unless that is under way.
    fn refresh(&mut self, engine: &Arc<Engine>, id: SaleId) {
        let engine = engine.clone();
        let refreshing = move || AbortOnDrop::spawn(async move { engine.solo.refresh(id).await });
        self.refreshing.entry(id).or_insert_with(refreshing);
    }

    async fn look_for_others(&mut self, engine: &Arc<Engine>) -> Result<()> {
        if engine.stores.ledger.has_other_workers(&engine.holder).await? {
            self.others_seen = Some(Instant::now());
            self.others_left = None;
            engine.has_others.store(true, Ordering::Relaxed);
        } else if engine.has_others.load(Ordering::Relaxed)
            && self.others_seen.is_none_or(|seen| seen.elapsed() >= OTHERS_KEPT)
            && self.others_left.as_ref().is_none_or(AbortOnDrop::is_finished)
        {
            // The last one to leave may have done something that we have not seen.
            let engine = engine.clone();
            self.others_left = Some(AbortOnDrop::spawn(async move {
                for id in engine.gate.sales() {
                    engine.solo.refresh(id).await;
                }
                engine.auth.forget_all();
                engine.has_others.store(false, Ordering::Relaxed);
            }));
        }
        Ok(())
    }
}

/// Brings the gate's settings of one sale up to date; returns how its marks differ from the ledger's, if they do.
async fn look_at(engine: &Engine, sale: Sale, before: Option<&Difference>) -> Result<Option<Difference>> {
    let id = sale.id;
    let Some(snapshot) = engine.gate.snapshot(id) else {
        // Another process made it, or it could not be opened when it was made here. The gate first: who sees a sale must not see an empty one.
        if let Some(loaded) = engine.stores.ledger.load(id).await? {
            engine.gate.open(loaded);
        }
        engine.sale_index.put(sale);
        return Ok(None);
    };
    let sold = (sale.sold, snapshot.settled);
    engine.gate.edit(&sale);
    engine.sale_index.put(sale);
    // Orders on their way are counted here and not there, so only a difference at rest counts, seen twice. What is in quarantine stays
    // counted here alone: a difference that a refresh does not end is looked into less and less often.
    if snapshot.marks != snapshot.settled || sold.0 == sold.1 {
        return Ok(None);
    }
    let times = before.filter(|before| before.sold == sold).map_or(1, |before| before.times + 1);
    Ok(Some(Difference { sold, times }))
}
