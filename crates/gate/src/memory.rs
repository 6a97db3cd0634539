//! The gate in memory.
//!
//! There is no stock counter. A sale has its marks (who has which order) and a cap; what remains is the cap less the marks.
//! Returning stock twice is then impossible: a release takes one mark away, if it is still that order's. The memory is
//! bounded by the stock, not by the crowd: who is refused leaves nothing behind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use stampede_core::admission::mark_digest;
use stampede_core::failpoint;
use stampede_core::ports::{Decision, LoadedSale, Snapshot};
use stampede_core::sale::closed;
use stampede_core::{Admission, Epoch, Money, OrderId, Refusal, Sale, SaleId, SaleStatus, Timestamp, UserId, Window};

#[derive(Debug)]
struct State {
    epoch: Epoch,
    ver: i64,
    status: SaleStatus,
    window: Window,
    price: Money,
    /// As the ledger has it. For a while there may be more marks: see [`State::cap`].
    cap: u32,
    /// The time of the latest admission: admissions never go back in time, whatever the clock does.
    high_water: Timestamp,
    seq: i64,
    /// Rises with every release, so that a reload can tell that what it read is out of date.
    generation: u64,
    /// How many of the marks are settled.
    settled: u32,
    marks: HashMap<UserId, Mark>,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    order: OrderId,
    /// The ledger has it. A mark that is not settled belongs to an order on its way.
    settled: bool,
}

/// The gates of all sales.
#[derive(Default)]
pub struct MemoryGate {
    sales: RwLock<HashMap<SaleId, Arc<Mutex<State>>>>,
}

impl State {
    fn marks(&self) -> u32 {
        u32::try_from(self.marks.len()).unwrap_or(u32::MAX)
    }

    /// Never below the marks. After a reload there may be more marks than the ledger's cap: those of orders on their way, which the ledger
    /// will refuse because other processes were quicker. When they are released, the cap is the ledger's again.
    fn cap(&self) -> u32 {
        self.cap.max(self.marks())
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            ver: self.ver,
            status: self.status,
            window: self.window,
            cap: self.cap(),
            marks: self.marks(),
            settled: self.settled,
        }
    }

    fn admit(&mut self, user: UserId, order: OrderId, now: Timestamp) -> Admission {
        let now = self.high_water.max(now);
        if failpoint::planted("skip-duplicate") {
            self.marks.remove(&user);
        }
        let (full, shut) = (self.marks() >= self.cap, closed(self.status, self.window, now));
        match self.marks.entry(user) {
            // Who has one gets it back whatever the hour; a draft alone is as if it were not there.
            Entry::Occupied(mark) if shut != Some(Refusal::NoSuchSale) => {
                let held = mark.get().order;
                if held == order { Admission::Admitted(held) } else { Admission::AlreadyHas(held) }
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
        self.sales.read().unwrap_or_else(PoisonError::into_inner).get(&sale).cloned()
    }

    fn with<T>(&self, sale: SaleId, act: impl FnOnce(&mut State) -> T) -> Option<T> {
        Some(act(&mut lock(&*self.find(sale)?)))
    }

    /// One for `user`, under the id `order`? `None` if there is no such sale.
    pub fn admit(&self, sale: SaleId, user: UserId, order: OrderId, now: Timestamp) -> Option<Decision> {
        self.with(sale, |state| {
            let admission = state.admit(user, order, now);
            Decision {
                admission,
                epoch: state.epoch,
                seq: state.seq,
                price: state.price,
                at: state.high_water.max(now),
            }
        })
    }

    /// Takes the user's mark away if it is still this order's, or sets it to `existing`, the live order the ledger found.
    pub fn release(&self, sale: SaleId, user: UserId, order: OrderId, existing: Option<OrderId>) -> bool {
        let released = self.with(sale, |state| {
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
            true
        });
        released.unwrap_or(false)
    }

    /// The ledger has these orders.
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

    /// Takes a newer version of the sale's settings. The cap is never set below the marks; what it became is returned.
    pub fn edit(&self, sale: &Sale) -> Option<u32> {
        self.with(sale.id, |state| {
            if sale.ver > state.ver {
                state.ver = sale.ver;
                state.status = sale.status;
                state.window = sale.window;
                state.cap = sale.cap.max(state.marks());
            }
            state.cap()
        })
    }

    /// Puts the sale in place as the ledger knows it, unless it is there already: what is there is newer.
    pub fn open(&self, loaded: LoadedSale) {
        let LoadedSale { sale, marks } = loaded;
        let marks: HashMap<_, _> =
            marks.into_iter().map(|(user, order)| (user, Mark { order, settled: true })).collect();
        let state = State {
            epoch: sale.epoch,
            ver: sale.ver,
            status: sale.status,
            window: sale.window,
            price: sale.price,
            cap: sale.cap.max(u32::try_from(marks.len()).unwrap_or(u32::MAX)),
            high_water: Timestamp::from_ms(0),
            seq: 0,
            generation: 0,
            settled: u32::try_from(marks.len()).unwrap_or(u32::MAX),
            marks,
        };
        let mut sales = self.sales.write().unwrap_or_else(PoisonError::into_inner);
        sales.entry(sale.id).or_insert_with(|| Arc::new(Mutex::new(state)));
    }

    /// To be taken before the ledger is read for a [`MemoryGate::reload`].
    pub fn generation(&self, sale: SaleId) -> Option<u64> {
        self.with(sale, |state| state.generation)
    }

    /// Takes over what the ledger knows of the sale, but for the marks of orders on their way. `false` if a mark was
    /// released since `generation`: what was read may then hold an order that is dead. No order of this sale may be
    /// recorded by this process between the read and this call.
    pub fn reload(&self, loaded: LoadedSale, generation: u64) -> bool {
        let LoadedSale { sale, marks } = loaded;
        let reloaded = self.with(sale.id, |state| {
            if state.generation != generation {
                return false;
            }
            state.marks.retain(|_, mark| !mark.settled);
            state.marks.extend(marks.into_iter().map(|(user, order)| (user, Mark { order, settled: true })));
            state.settled = u32::try_from(state.marks.values().filter(|mark| mark.settled).count()).unwrap_or(u32::MAX);
            state.epoch = sale.epoch;
            // An edit may have come since the read.
            if sale.ver >= state.ver {
                state.ver = sale.ver;
                state.status = sale.status;
                state.window = sale.window;
                state.cap = sale.cap;
            }
            true
        });
        reloaded.unwrap_or(false)
    }

    /// The sale as the gate has it now, in one moment.
    pub fn snapshot(&self, sale: SaleId) -> Option<Snapshot> {
        self.with(sale, |state| state.snapshot())
    }

    /// The sale as the gate has it now, with a digest over its marks, of one moment.
    pub fn digest(&self, sale: SaleId) -> Option<(Snapshot, u64)> {
        self.with(sale, |state| {
            (state.snapshot(), mark_digest(state.marks.iter().map(|(&user, mark)| (user, mark.order))))
        })
    }

    /// The sales that are open here.
    pub fn sales(&self) -> Vec<SaleId> {
        self.sales.read().unwrap_or_else(PoisonError::into_inner).keys().copied().collect()
    }

    /// Forgets the sale.
    pub fn remove(&self, sale: SaleId) -> bool {
        self.sales.write().unwrap_or_else(PoisonError::into_inner).remove(&sale).is_some()
    }

    /// Every mark of the sale.
    pub fn marks(&self, sale: SaleId) -> Vec<(UserId, OrderId)> {
        self.with(sale, |state| state.marks.iter().map(|(&user, mark)| (user, mark.order)).collect())
            .unwrap_or_default()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // Nothing under this lock panics between two changes that belong together.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for MemoryGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sales = self.sales.read().unwrap_or_else(PoisonError::into_inner).len();
        f.debug_struct("MemoryGate").field("sales", &sales).finish()
    }
}

#[cfg(test)]
mod tests;
