//! The gate in memory.
//!
//! Its memory is bounded by the stock, not by the number of buyers: a buyer who is refused leaves nothing behind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};
use stampede_core::admission::mark_digest;
use stampede_core::failpoint;
use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Decision, Gate, GateError, LoadedSale, Snapshot};
use stampede_core::sale::closed_reason;
use stampede_core::{Admission, Epoch, Money, OrderId, Refusal, Sale, SaleId, SaleStatus, Timestamp, UserId, Window};

#[derive(Debug)]
struct State {
    epoch: Epoch,
    version: i64,
    status: SaleStatus,
    window: Window,
    price: Money,
    /// The ledger's cap. For a while there may be more marks: see [`State::cap`].
    cap: u32,
    /// The time of the latest admission. Admissions never go back in time, whatever the clock does.
    high_water: Timestamp,
    seq: i64,
    /// Counts releases and edits: see [`Decision::generation`].
    generation: u64,
    /// Counts releases, so that a reload can tell that what it read is out of date.
    releases: u64,
    /// How many of the marks are settled.
    settled: u32,
    marks: HashMap<UserId, Mark>,
    /// Whether a user whose order has ended may buy again.
    buy_again: bool,
    /// The orders of users who may not buy again. Bounded by the number of orders.
    ended: HashMap<UserId, OrderId>,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    order: OrderId,
    /// Whether the ledger has the order. A mark that is not settled belongs to an order on its way.
    settled: bool,
}

/// The gate of all sales.
#[derive(Default)]
pub struct MemoryGate {
    sales: RwLock<HashMap<SaleId, Arc<Mutex<State>>>>,
}

impl State {
    fn marks(&self) -> u32 {
        u32::try_from(self.marks.len()).unwrap_or(u32::MAX)
    }

    /// Never below the number of marks. After a reload there may be more marks than the ledger's cap: those of orders on their way,
    /// which the ledger will refuse because other processes were quicker. When they are released, the cap is the ledger's again.
    fn cap(&self) -> u32 {
        self.cap.max(self.marks())
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            version: self.version,
            status: self.status,
            window: self.window,
            cap: self.cap(),
            marks: self.marks(),
            settled: self.settled,
            outbox: None,
        }
    }

    fn admit(&mut self, user: UserId, order: OrderId, now: Timestamp) -> Admission {
        let now = self.high_water.max(now);
        if failpoint::planted("skip-duplicate") {
            self.marks.remove(&user);
        }
        let (full, shut) = (self.marks() >= self.cap, closed_reason(self.status, self.window, now));
        match self.marks.entry(user) {
            // A buyer who holds a mark gets its order id whatever state the sale is in, except that a draft is not shown.
            Entry::Occupied(mark) if shut != Some(Refusal::NoSuchSale) => {
                let held = mark.get().order;
                if held == order { Admission::Admitted(held) } else { Admission::AlreadyHas(held) }
            }
            Entry::Vacant(free) if shut != Some(Refusal::NoSuchSale) && self.ended.contains_key(free.key()) => {
                Admission::AlreadyHas(self.ended[free.key()])
            }
            Entry::Vacant(free) if shut.is_none() && !full => {
                free.insert(Mark { order, settled: false });
                self.seq += 1;
                self.high_water = now;
                Admission::Admitted(order)
            }
            _ => Admission::Refused(shut.unwrap_or(Refusal::SoldOut)),
        }
    }
}

impl MemoryGate {
    pub fn new() -> Self {
        Self::default()
    }

    fn find(&self, sale: SaleId) -> Option<Arc<Mutex<State>>> {
        self.sales.read().get(&sale).cloned()
    }

    fn with<T>(&self, sale: SaleId, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        Some(act(&mut self.find(sale)?.lock()))
    }

    /// Decides whether `user` may buy, under the order id `order`. `None` if there is no such sale.
    pub fn admit(&self, sale: SaleId, user: UserId, order: OrderId, now: Timestamp) -> Option<Decision> {
        self.with(sale, |state| {
            let admission = state.admit(user, order, now);
            let State { epoch, generation, seq, price, .. } = *state;
            Decision { admission, epoch, generation, seq, price, at: state.high_water.max(now) }
        })
    }

    /// Removes the user's mark if it still belongs to this order, or sets it to the live order that the ledger found.
    pub fn release(&self, sale: SaleId, release: &Release) -> bool {
        let &Release { user, order, existing, ended } = release;
        let released = self.with(sale, |state| {
            if ended && !state.buy_again {
                // Also if the mark is gone: it may have been released by a caller that did not know why the order is dead.
                state.ended.insert(user, order);
            }
            let Entry::Occupied(mut mark) = state.marks.entry(user) else { return false };
            if mark.get().order != order {
                return false;
            }
            let was = match existing {
                Some(order) => mark.insert(Mark { order, settled: true }),
                None => mark.remove(),
            };
            state.settled = state.settled + u32::from(existing.is_some()) - u32::from(was.settled);
            state.generation += 1;
            state.releases += 1;
            true
        });
        released.unwrap_or(false)
    }

    /// Notes that the ledger has these orders.
    pub fn settle(&self, sale: SaleId, orders: impl IntoIterator<Item = (UserId, OrderId)>) {
        self.with(sale, |state| {
            for (user, order) in orders {
                if let Some(mark) = state.marks.get_mut(&user).filter(|mark| mark.order == order && !mark.settled) {
                    mark.settled = true;
                    state.settled += 1;
                }
            }
        });
    }

    /// Applies a newer version of the sale's settings. The cap is never set below the number of marks. Returns the resulting cap.
    pub fn edit(&self, sale: &Sale) -> Option<u32> {
        self.with(sale.id, |state| {
            if sale.version > state.version {
                state.version = sale.version;
                state.status = sale.status;
                state.window = sale.window;
                state.cap = sale.cap.max(state.marks());
                state.generation += 1;
            }
            state.cap()
        })
    }

    /// Opens the sale with the ledger's settings and marks, unless it is open: what the gate has is newer.
    pub fn open(&self, loaded: LoadedSale) {
        let LoadedSale { sale, marks, ended } = loaded;
        let marks: HashMap<_, _> =
            marks.into_iter().map(|(user, order)| (user, Mark { order, settled: true })).collect();
        let state = State {
            epoch: sale.epoch,
            version: sale.version,
            status: sale.status,
            window: sale.window,
            price: sale.price,
            cap: sale.cap.max(u32::try_from(marks.len()).unwrap_or(u32::MAX)),
            high_water: Timestamp::from_ms(0),
            seq: 0,
            generation: 0,
            releases: 0,
            settled: u32::try_from(marks.len()).unwrap_or(u32::MAX),
            marks,
            buy_again: sale.buy_again,
            ended: ended.into_iter().collect(),
        };
        let mut sales = self.sales.write();
        sales.entry(sale.id).or_insert_with(|| Arc::new(Mutex::new(state)));
    }

    /// The number of releases, to be read before the ledger is read for a [`MemoryGate::reload`].
    pub fn releases(&self, sale: SaleId) -> Option<u64> {
        self.with(sale, |state| state.releases)
    }

    /// Replaces the state by the ledger's, except for the marks of orders on their way. Returns `false` and changes nothing if a
    /// mark was released since `releases` was read: the ledger's state may then contain an order that is dead. This process must
    /// not record an order of this sale between the read and this call.
    pub fn reload(&self, loaded: LoadedSale, releases: u64) -> bool {
        let LoadedSale { sale, marks, ended } = loaded;
        let reloaded = self.with(sale.id, |state| {
            if state.releases != releases {
                return false;
            }
            state.marks.retain(|_, mark| !mark.settled);
            state.marks.extend(marks.into_iter().map(|(user, order)| (user, Mark { order, settled: true })));
            state.settled = u32::try_from(state.marks.values().filter(|mark| mark.settled).count()).unwrap_or(u32::MAX);
            state.ended = ended.into_iter().collect();
            state.epoch = sale.epoch;
            state.generation += 1;
            // An edit may have been applied since the read.
            if sale.version >= state.version {
                state.version = sale.version;
                state.status = sale.status;
                state.window = sale.window;
                state.cap = sale.cap;
            }
            true
        });
        reloaded.unwrap_or(false)
    }

    /// The state of the sale.
    pub fn snapshot(&self, sale: SaleId) -> Option<Snapshot> {
        self.with(sale, |state| state.snapshot())
    }

    /// The state of the sale, with a digest over its marks of the same moment.
    pub fn digest(&self, sale: SaleId) -> Option<(Snapshot, u64)> {
        self.with(sale, |state| {
            (state.snapshot(), mark_digest(state.marks.iter().map(|(&user, mark)| (user, mark.order))))
        })
    }

    /// The sales that are open.
    pub fn sales(&self) -> Vec<SaleId> {
        self.sales.read().keys().copied().collect()
    }

    /// Removes the sale.
    pub fn remove(&self, sale: SaleId) -> bool {
        self.sales.write().remove(&sale).is_some()
    }

    /// Every mark of the sale.
    pub fn marks(&self, sale: SaleId) -> Option<Vec<(UserId, OrderId)>> {
        self.with(sale, |state| state.marks.iter().map(|(&user, mark)| (user, mark.order)).collect())
    }
}

#[async_trait]
impl Gate for MemoryGate {
    async fn admit(
        &self,
        sale: SaleId,
        requests: &[AdmitRequest],
        now: Timestamp,
    ) -> Result<Option<Vec<Decision>>, GateError> {
        Ok(requests.iter().map(|&AdmitRequest { user, order }| self.admit(sale, user, order, now)).collect())
    }

    async fn release(&self, sale: SaleId, releases: &[Release]) -> Result<Vec<bool>, GateError> {
        Ok(releases.iter().map(|release| self.release(sale, release)).collect())
    }

    async fn edit(&self, sale: &Sale) -> Result<Option<u32>, GateError> {
        Ok(self.edit(sale))
    }

    async fn open(&self, loaded: LoadedSale) -> Result<(), GateError> {
        self.open(loaded);
        Ok(())
    }

    async fn snapshot(&self, sale: SaleId) -> Result<Option<Snapshot>, GateError> {
        Ok(self.snapshot(sale))
    }

    async fn digest(&self, sale: SaleId) -> Result<Option<(Snapshot, u64)>, GateError> {
        Ok(self.digest(sale))
    }

    async fn marks(&self, sale: SaleId) -> Result<Option<Vec<(UserId, OrderId)>>, GateError> {
        Ok(self.marks(sale))
    }
}

impl fmt::Debug for MemoryGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sales = self.sales.read().len();
        f.debug_struct("MemoryGate").field("sales", &sales).finish()
    }
}

#[cfg(test)]
mod tests;
