//! Compares the ledger's sales with the gate: another process may have edited or created a sale, or cancelled an order; or this
//! process may have failed between the ledger and the gate. Also removes sales that are long over.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stampede_core::ports::Result;
use stampede_core::{Sale, SaleId};
use tokio_util::task::AbortOnDropHandle;

use super::{Context, Solo};
use crate::edits;
use crate::error::describe;
use crate::reduction::{self, Reductions};
use crate::retention::{RETENTION, is_past_retention};

/// How often the sales are compared. An edit holds in other processes within a second.
const INTERVAL: Duration = Duration::from_millis(500);
/// After this time every other process that runs has looked for others, even if a round takes longer than usual.
pub(super) const NOTICED_WITHIN: Duration = Duration::from_secs(2);
/// How long after another process was last seen its effects may still appear.
const OTHERS_TIMEOUT: Duration = Duration::from_secs(5);

/// The numbers of orders sold and the caps of the ledger and of the gate, where they differ, and how often in a row they did.
#[derive(Debug, Clone, Copy)]
struct Difference {
    sold: (u32, u32),
    cap: (u32, u32),
    times: u32,
}

/// How many orders of a sale had died at the last check, and how often the sale is still to be reloaded because of that.
#[derive(Debug, Clone, Copy, Default)]
struct Released {
    seen: i64,
    reloads_due: u32,
}

/// A reload that a release overtakes is discarded; the second one follows an interval later.
const RELOADS_AFTER_RELEASE: u32 = 2;

#[derive(Default)]
struct Watch {
    others_seen: Option<Instant>,
    differences: HashMap<SaleId, Difference>,
    /// An order that died elsewhere and one that was sold elsewhere leave the counts equal, so deaths are watched, too.
    released: HashMap<SaleId, Released>,
    /// What may wait for an order that is being recorded, or for a sale's row, runs in tasks, so that one sale does not hold up the others.
    refreshing: HashMap<SaleId, AbortOnDropHandle<()>>,
    others_left: Option<AbortOnDropHandle<()>>,
    retiring: Vec<AbortOnDropHandle<()>>,
    reductions: Reductions,
}

/// Runs until `solo` is dropped.
pub(super) async fn run(solo: Weak<Solo>) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watch = Watch::default();
    loop {
        ticks.tick().await;
        let Some(solo) = solo.upgrade() else { return };
        if let Err(error) = watch.check(&solo).await {
            tracing::warn!(error = describe(&error), "cannot compare the sales with the ledger; trying again");
        }
    }
}

impl Watch {
    async fn check(&mut self, solo: &Arc<Solo>) -> Result<()> {
        self.refreshing.retain(|_, task| !task.is_finished());
        self.retiring.retain(|task| !task.is_finished());
        if solo.config.shared_ledger {
            self.check_for_other_workers(solo).await?;
        }
        let now = solo.context.clock.now();
        for id in solo.gate.sales() {
            if solo.context.sale_index.get(id).is_some_and(|sale| is_past_retention(&sale, now)) && solo.gate.remove(id)
            {
                let solo = solo.clone();
                self.retiring.push(spawn(async move { solo.retire(id).await }));
            }
        }
        let (mut differences, mut released) = (HashMap::new(), HashMap::new());
        let ledger = solo.context.ledger.as_ref();
        let pending = edits::pending(ledger).await?;
        let sales = ledger.sales(Some(now.minus(RETENTION))).await?;
        edits::note_retired(ledger, &pending, &sales, now).await?;
        for sale in sales {
            let id = sale.id;
            released.insert(id, self.reload_if_released(solo, &sale));
            match update(solo, sale, pending.contains(&id), self.differences.get(&id), &self.reductions).await {
                Ok(Some(difference)) => {
                    if difference.times > 1 && difference.times.is_power_of_two() {
                        self.refresh(solo, id);
                    }
                    differences.insert(id, difference);
                }
                Ok(None) => {}
                // The other sales are compared all the same.
                Err(error) => {
                    tracing::warn!(sale = %id, error = describe(&error), "cannot compare a sale with the ledger; trying again");
                }
            }
        }
        (self.differences, self.released) = (differences, released);
        Ok(())
    }

    /// Reloads the sale if orders of it have died and none of its orders is on its way.
    fn reload_if_released(&mut self, solo: &Arc<Solo>, sale: &Sale) -> Released {
        let mut released = self.released.get(&sale.id).copied().unwrap_or_default();
        if sale.released != released.seen {
            released = Released { seen: sale.released, reloads_due: RELOADS_AFTER_RELEASE };
        }
        let at_rest = solo.gate.snapshot(sale.id).is_some_and(|snapshot| snapshot.marks == snapshot.settled);
        if !solo.context.has_others.load(Ordering::Relaxed) {
            // Without other processes every release went through this gate.
            released.reloads_due = 0;
        } else if released.reloads_due > 0 && at_rest && self.refresh(solo, sale.id) {
            released.reloads_due -= 1;
        }
        released
    }

    /// Reloads the sale from the ledger, unless that is under way. Returns whether it was begun.
    fn refresh(&mut self, solo: &Arc<Solo>, id: SaleId) -> bool {
        let Entry::Vacant(entry) = self.refreshing.entry(id) else { return false };
        let solo = solo.clone();
        entry.insert(spawn(async move { solo.refresh(id).await }));
        true
    }

    async fn check_for_other_workers(&mut self, solo: &Arc<Solo>) -> Result<()> {
        let has_others = &solo.context.has_others;
        if solo.context.ledger.has_other_workers(&solo.context.holder).await? {
            self.others_seen = Some(Instant::now());
            self.others_left = None;
            has_others.store(true, Ordering::Relaxed);
        } else if has_others.load(Ordering::Relaxed)
            && self.others_seen.is_none_or(|seen| seen.elapsed() >= OTHERS_TIMEOUT)
            && self.others_left.as_ref().is_none_or(AbortOnDropHandle::is_finished)
        {
            // The last process to leave may have done something that this one has not seen.
            let solo = solo.clone();
            self.others_left = Some(spawn(async move {
                for id in solo.gate.sales() {
                    solo.refresh(id).await;
                }
                solo.context.sessions.retain(|_| false);
                solo.context.has_others.store(false, Ordering::Relaxed);
            }));
        }
        Ok(())
    }
}

fn spawn(task: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(task))
}

/// Completes a reduction of a sale's stock. `cap` is the gate's.
async fn complete_reduction(solo: Arc<Solo>, sale: Sale, cap: Option<u32>) -> Result<()> {
    let Context { ledger, clock, sale_index, .. } = &solo.context;
    sale_index.put(reduction::complete(ledger.as_ref(), sale, cap, clock.now()).await?);
    Ok(())
}

/// Applies the ledger's settings of one sale to the gate. Returns how its marks differ from the ledger's, if they do.
/// `has_pending_edits`: the ledger does not know whether the gate has the sale's edits.
async fn update(
    solo: &Arc<Solo>,
    sale: Sale,
    has_pending_edits: bool,
    before: Option<&Difference>,
    reductions: &Reductions,
) -> Result<Option<Difference>> {
    let (id, version) = (sale.id, sale.version);
    let Some(snapshot) = solo.gate.snapshot(id) else {
        // Another process created it, or it could not be opened when it was created here. The gate is opened before the index
        // shows the sale, so that it is never shown with nothing left.
        if let Some(loaded) = solo.context.ledger.load(id).await? {
            solo.gate.open(loaded);
        }
        solo.context.sale_index.put(sale);
        return Ok(None);
    };
    let sold = (sale.sold, snapshot.settled);
    let cap = solo.gate.edit(&sale);
    let cap = if sale.cap < sale.total {
        // Until the reduction is completed, the ledger's cap may be lower than the gate's.
        reductions.start(id, complete_reduction(solo.clone(), sale.clone(), cap));
        (sale.cap, sale.cap)
    } else {
        // Another process has completed a reduction that this gate has taken with other marks: the version is the same, the cap is not.
        (sale.cap, cap.unwrap_or(sale.cap))
    };
    if has_pending_edits {
        let Context { ledger, clock, .. } = &solo.context;
        ledger.note_applied_edits(id, version, clock.now()).await?;
    }
    solo.context.sale_index.put(sale);
    // Orders on their way are in the gate and not in the ledger, so a difference counts only if there are none, and if it is seen
    // twice. Quarantined orders are a lasting difference: a reload does not end it, so it is reloaded less and less often.
    if snapshot.marks != snapshot.settled || (sold.0 == sold.1 && cap.0 == cap.1) {
        return Ok(None);
    }
    let times = before.filter(|before| (before.sold, before.cap) == (sold, cap)).map_or(1, |before| before.times + 1);
    Ok(Some(Difference { sold, cap, times }))
}
