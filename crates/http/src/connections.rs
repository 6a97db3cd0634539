//! Which connections are open, and which of them is closed when there is no room for another.
//!
//! There are two bounds: all connections of a listener, and those of one address. An IPv6 /64 counts as one address; trusted proxies
//! have no bound of their own. At either bound an idle connection, that is one without a request under way, is closed to make room;
//! if there is none, the new connection is refused.
//!
//! Of some idle connections, taken in turns, the one goes that was used least recently. One that was used a moment ago stays: its next
//! request may be on the way. A request costs no more than a time stamp.

use std::collections::HashMap;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Instant;

use futures_util::task::AtomicWaker;

/// A request is being answered.
const REQUEST: u64 = 1;
/// An answer waits for the peer to read.
const BLOCKED: u64 = 2;
/// Another connection has the place of this one.
const EVICTED: u64 = 4;
/// What is above these bits is the time of the last use, in milliseconds.
const FLAG_BITS: u32 = 3;

const EVICTED_TOTAL: &str = "stampede_connections_evicted_total";
pub(crate) const REFUSED_TOTAL: &str = "stampede_connections_refused_total";

/// A connection counts as idle this long after it was used, or opened.
const IDLE_AFTER_MS: u64 = 100;
/// Of how many idle connections the least recently used goes.
const SAMPLE: usize = 16;
/// How many connections are looked at for them: finding none must stay cheap when everything is full.
const MAX_LOOKS: usize = 10_000;

/// Milliseconds since some moment in the past.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// One connection, as its task and the others see it.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// `None` for one that counts for no address.
    address: Option<IpAddr>,
    /// When it was used last, and what goes on: [`REQUEST`], [`BLOCKED`], [`EVICTED`].
    state: AtomicU64,
    /// Wakes the connection's task.
    task: AtomicWaker,
    /// Its places among all, and among those of its address. Written and read under the lock of [`Connections`].
    places: [AtomicUsize; 2],
}

impl Connection {
    /// A request is under way until what is returned is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> UnderWay {
        let before = self.state.fetch_or(REQUEST, Ordering::AcqRel);
        UnderWay { connection: self.clone(), is_evicted: before & EVICTED != 0 }
    }

    /// Whether an answer waits for the peer to read.
    pub(crate) fn set_blocked(&self, is_blocked: bool) {
        if is_blocked {
            self.state.fetch_or(BLOCKED, Ordering::AcqRel);
        } else {
            self.state.fetch_and(!BLOCKED, Ordering::AcqRel);
        }
    }

    /// Its state, if it is idle. A greater one was used later.
    fn idle_state(&self, now_ms: u64) -> Option<u64> {
        let state = self.state.load(Ordering::Acquire);
        let is_idle = state & (REQUEST | BLOCKED | EVICTED) == 0;
        (is_idle && (state >> FLAG_BITS) + IDLE_AFTER_MS <= now_ms).then_some(state)
    }

    /// Asks the connection to close, if it is still in this idle state.
    fn evict(&self, idle: u64) -> bool {
        let change = self.state.compare_exchange(idle, idle | EVICTED, Ordering::AcqRel, Ordering::Relaxed);
        if change.is_ok() {
            self.task.wake();
        }
        change.is_ok()
    }

    fn is_evicted(&self) -> bool {
        self.state.load(Ordering::Acquire) & EVICTED != 0
    }

    fn is_working(&self) -> bool {
        self.state.load(Ordering::Acquire) & (REQUEST | BLOCKED) != 0
    }
}

/// A request under way.
#[derive(Debug)]
pub(crate) struct UnderWay {
    connection: Arc<Connection>,
    /// The request came at the moment in which its connection was given up: there is no room for it.
    pub(crate) is_evicted: bool,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // While a request is under way, its own task alone changes the state.
        let flags = self.connection.state.load(Ordering::Acquire) & (BLOCKED | EVICTED);
        self.connection.state.store(now_ms() << FLAG_BITS | flags, Ordering::Release);
    }
}

/// Connections that are looked at in turns. Each knows its place here, as the number `KIND` of its places.
#[derive(Debug, Default)]
struct Ring<const KIND: usize> {
    members: Vec<Arc<Connection>>,
    /// Where to look next.
    next: usize,
}

impl<const KIND: usize> Ring<KIND> {
    fn push(&mut self, connection: Arc<Connection>) {
        connection.places[KIND].store(self.members.len(), Ordering::Relaxed);
        self.members.push(connection);
    }

    fn remove(&mut self, connection: &Connection) {
        let place = connection.places[KIND].load(Ordering::Relaxed);
        self.members.swap_remove(place);
        if let Some(moved) = self.members.get(place) {
            moved.places[KIND].store(place, Ordering::Relaxed);
        }
    }

    /// Closes one that is idle.
    fn evict(&mut self, now_ms: u64) -> Option<Arc<Connection>> {
        let count = self.members.len();
        let (mut oldest, mut found) = (None, 0);
        for _ in 0..count.min(MAX_LOOKS) {
            let place = self.next % count;
            self.next = place + 1;
            if let Some(state) = self.members[place].idle_state(now_ms) {
                oldest = Some(oldest.map_or((state, place), |known: (u64, usize)| known.min((state, place))));
                found += 1;
            }
            if found == SAMPLE {
                break;
            }
        }
        let (state, place) = oldest?;
        // It may have got a request since; another one can wait for the next try.
        self.members[place].evict(state).then(|| self.members[place].clone())
    }
}

#[derive(Debug, Default)]
struct Open {
    all: Ring<0>,
    by_address: HashMap<IpAddr, Ring<1>>,
}

impl Open {
    fn insert(&mut self, connection: &Arc<Connection>) {
        self.all.push(connection.clone());
        if let Some(address) = connection.address {
            self.by_address.entry(address).or_default().push(connection.clone());
        }
    }

    fn remove(&mut self, connection: &Connection) {
        self.all.remove(connection);
        if let Some(address) = connection.address
            && let Some(ring) = self.by_address.get_mut(&address)
        {
            ring.remove(connection);
            if ring.members.is_empty() {
                self.by_address.remove(&address);
            }
        }
    }

    /// Forgets an idle connection that was asked to close.
    fn forget(&mut self, evicted: Option<&Connection>) -> bool {
        if let Some(evicted) = evicted {
            self.remove(evicted);
            metrics::counter!(EVICTED_TOTAL).increment(1);
        }
        evicted.is_some()
    }

    /// Closes an idle connection. `false` if there is none.
    fn evict_one(&mut self, now_ms: u64) -> bool {
        let evicted = self.all.evict(now_ms);
        self.forget(evicted.as_deref())
    }
}

/// The open connections of a listener.
#[derive(Debug)]
pub(crate) struct Connections {
    max: usize,
    max_per_address: usize,
    open: Mutex<Open>,
}

impl Connections {
    pub(crate) fn new(max: usize, max_per_address: usize) -> Arc<Self> {
        // Both are shown from the start, not only when something has happened.
        for name in [EVICTED_TOTAL, REFUSED_TOTAL] {
            metrics::counter!(name).increment(0);
        }
        Arc::new(Self { max, max_per_address, open: Mutex::default() })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection, if there is one or can be made. Without an address only the bound of all counts.
    pub(crate) fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Admitted> {
        self.admit_at(address, now_ms())
    }

    fn admit_at(self: &Arc<Self>, address: Option<IpAddr>, now_ms: u64) -> Option<Admitted> {
        let mut open = self.open();
        let ring = address.and_then(|address| open.by_address.get_mut(&address));
        let has_room = match ring {
            Some(ring) if ring.members.len() >= self.max_per_address => {
                let evicted = ring.evict(now_ms);
                open.forget(evicted.as_deref())
            }
            _ => open.all.members.len() < self.max || open.evict_one(now_ms),
        };
        if !has_room {
            return None;
        }
        let state = AtomicU64::new(now_ms << FLAG_BITS);
        let connection = Arc::new(Connection { address, state, ..Connection::default() });
        open.insert(&connection);
        metrics::gauge!("stampede_connections_open").increment(1.0);
        Some(Admitted { connections: self.clone(), connection })
    }

    /// Closes an idle connection, if there is one.
    pub(crate) fn evict_one(&self) {
        self.open().evict_one(now_ms());
    }
}

/// The place of an open connection.
#[derive(Debug)]
pub(crate) struct Admitted {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
}

impl Admitted {
    pub(crate) const fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Serves the connection to its end, or until it is idle and its place is needed. Requests begin and end while `serving` is
    /// polled, so an idle one stays idle until it is dropped.
    pub(crate) async fn until_evicted<F: Future>(self, serving: F) -> Option<F::Output> {
        let mut serving = pin!(serving);
        poll_fn(|context| {
            self.connection.task.register(context.waker());
            if let Poll::Ready(done) = serving.as_mut().poll(context) {
                return Poll::Ready(Some(done));
            }
            let is_over = self.connection.is_evicted() && !self.connection.is_working();
            if is_over { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        // One that was evicted has lost its place already.
        if !self.connection.is_evicted() {
            open.remove(&self.connection);
        }
        metrics::gauge!("stampede_connections_open").decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)));
    const B: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)));

    /// Long after everything that a test does.
    const LATER: u64 = 10_000_000;

    fn admit(connections: &Arc<Connections>, address: Option<IpAddr>, count: usize) -> Vec<Admitted> {
        (0..count).map_while(|_| connections.admit(address)).collect()
    }

    fn count(connections: &Connections) -> (usize, usize) {
        let open = connections.open();
        (open.all.members.len(), open.by_address.values().map(|ring| ring.members.len()).sum())
    }

    fn evicted(held: &[Admitted]) -> Vec<bool> {
        held.iter().map(|one| one.connection().is_evicted()).collect()
    }

    #[test]
    fn an_address_has_its_bound_and_a_proxy_has_none() {
        let connections = Connections::new(10, 3);
        let held = admit(&connections, A, 3);
        let requests: Vec<_> = held.iter().map(|one| one.connection().begin()).collect();
        assert!(connections.admit_at(A, LATER).is_none(), "all of its connections are busy");
        let others = admit(&connections, None, 7);
        assert_eq!((others.len(), count(&connections)), (7, (10, 3)));
        drop(requests);
        let fourth = connections.admit_at(A, LATER).expect("one of its own is idle");
        assert_eq!((evicted(&held).iter().filter(|&&it| it).count(), count(&connections)), (1, (10, 3)));
        drop((held, others, fourth));
        assert_eq!(count(&connections), (0, 0));
    }

    #[test]
    fn the_least_recently_used_idle_connection_is_closed_for_a_new_one() {
        let connections = Connections::new(4, 4);
        let held: Vec<_> = (0..4).map(|n| connections.admit_at(A, 400 - n * 100).unwrap()).collect();
        let busy = held[3].connection().begin();
        assert!(connections.admit_at(B, 250).is_none(), "none has been idle for long");
        let new = connections.admit_at(B, LATER).unwrap();
        assert_eq!(evicted(&held), [false, false, true, false]);
        let newer = connections.admit_at(B, LATER).unwrap();
        assert_eq!(evicted(&held), [false, true, true, false]);
        assert!(held[2].connection().begin().is_evicted, "too late");
        assert_eq!(count(&connections), (4, 4));
        drop((busy, held, new, newer));
        assert_eq!(count(&connections), (0, 0));
    }

    #[test]
    fn nothing_is_closed_while_it_works() {
        let connections = Connections::new(2, 2);
        let held = admit(&connections, A, 2);
        let request = held[0].connection().begin();
        held[1].connection().set_blocked(true);
        assert!(connections.admit_at(B, LATER).is_none());
        held[1].connection().set_blocked(false);
        assert!(connections.admit_at(B, LATER).is_some());
        drop(request);
    }

    #[tokio::test]
    async fn an_evicted_connection_ends() {
        let connections = Connections::new(1, 1);
        let first = connections.admit(A).unwrap();
        let serving = tokio::spawn(first.until_evicted(std::future::pending::<()>()));
        tokio::task::yield_now().await;
        let second = connections.admit_at(B, LATER).unwrap();
        assert!(serving.await.unwrap().is_none());
        assert_eq!(second.until_evicted(async { 7 }).await, Some(7));
    }
}
