//! Compares the ledger's sales with the gate: another process may have edited or created a sale, or cancelled an order; or this
//! process may have failed between the ledger and the gate. Also removes sales that are long over.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stampede_core::ports::Result;
use stampede_core::{Sale, SaleId};
use tokio_util::task::AbortOnDropHandle;

use super::Solo;
use crate::error::describe;
use crate::reduction;
use crate::retention::{RETENTION, is_past_retention};

pub(super) const INTERVAL: Duration = Duration::from_secs(1);
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
    /// What may wait for an order that is being recorded runs in tasks, so that one sale does not hold up the others.
    refreshing: HashMap<SaleId, AbortOnDropHandle<()>>,
    others_left: Option<AbortOnDropHandle<()>>,
    retiring: Vec<AbortOnDropHandle<()>>,
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
        for sale in solo.context.ledger.sales(Some(now.minus(RETENTION))).await? {
            let id = sale.id;
            released.insert(id, self.reload_if_released(solo, &sale));
            if let Some(difference) = update(solo, sale, self.differences.get(&id)).await? {
                if difference.times > 1 && difference.times.is_power_of_two() {
                    self.refresh(solo, id);
                }
                differences.insert(id, difference);
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
        } else if released.reloads_due > 0 && at_rest {
            released.reloads_due -= 1;
            self.refresh(solo, sale.id);
        }
        released
    }

    /// Reloads the sale from the ledger, unless that is under way.
    fn refresh(&mut self, solo: &Arc<Solo>, id: SaleId) {
        let solo = solo.clone();
        self.refreshing.entry(id).or_insert_with(|| spawn(async move { solo.refresh(id).await }));
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

/// Applies the ledger's settings of one sale to the gate. Returns how its marks differ from the ledger's, if they do.
async fn update(solo: &Solo, sale: Sale, before: Option<&Difference>) -> Result<Option<Difference>> {
    let id = sale.id;
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
    let sale = reduction::complete(solo.context.ledger.as_ref(), sale, cap, solo.context.clock.now()).await?;
    // Another process has completed a reduction that this gate has taken with other marks: the version is the same, the cap is not.
    let cap = (sale.cap, cap.unwrap_or(sale.cap));
    solo.context.sale_index.put(sale);
    // Orders on their way are in the gate and not in the ledger, so a difference counts only if there are none, and if it is seen
    // twice. Quarantined orders are a lasting difference: a reload does not end it, so it is reloaded less and less often.
    if snapshot.marks != snapshot.settled || (sold.0 == sold.1 && cap.0 == cap.1) {
        return Ok(None);
    }
    let times = before.filter(|before| (before.sold, before.cap) == (sold, cap)).map_or(1, |before| before.times + 1);
    Ok(Some(Difference { sold, cap, times }))
}
