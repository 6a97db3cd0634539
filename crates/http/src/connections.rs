//! The open connections of a listener, their limits, and the eviction of idle ones.
//!
//! There are two limits: on all connections of a listener, and on those of one address. An IPv6 /64 counts as one address; trusted
//! proxies have no limit of their own. At either limit an idle connection, that is one without a request in progress, is evicted to make
//! room; if there is none, the new connection is refused.
//!
//! The victim is the least recently used connection of a sample of idle ones; samples are taken round-robin. A connection that was used a
//! moment ago does not count as idle, because its next request may be on the way. A request costs no more than a timestamp.

use std::collections::HashMap;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::time::Instant;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

/// A request is in progress.
const REQUEST: u64 = 1;
/// A response waits for the peer to read.
const BLOCKED: u64 = 2;
/// The connection was evicted and must close.
const EVICTED: u64 = 4;
/// The bits above the flags hold the time of the last use, in milliseconds.
const FLAG_BITS: u32 = 3;

const EVICTED_TOTAL: &str = "stampede_connections_evicted_total";
pub(crate) const REFUSED_TOTAL: &str = "stampede_connections_refused_total";

/// A connection counts as idle this long after it was last used, or opened.
const IDLE_AFTER_MS: u64 = 100;
/// From how many idle connections the victim is chosen.
const SAMPLE: usize = 16;
/// How many connections are examined to find them: an unsuccessful search must stay cheap.
const MAX_EXAMINED: usize = 10_000;

/// Milliseconds since the first call.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// The state of one connection, shared by its task and the listener.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// `None` if the connection has no limit per address.
    address: Option<IpAddr>,
    /// The time of the last use, and the flags [`REQUEST`], [`BLOCKED`] and [`EVICTED`].
    state: AtomicU64,
    /// Wakes the connection's task.
    task: AtomicWaker,
    /// Its indexes in the ring of all connections and in the ring of its address. Guarded by the lock of [`Connections`].
    indexes: [AtomicUsize; 2],
}

impl Connection {
    /// Marks a request as in progress until the guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestGuard {
        let before = self.state.fetch_or(REQUEST, Ordering::AcqRel);
        RequestGuard { connection: self.clone(), is_evicted: before & EVICTED != 0 }
    }

    /// Sets whether a response waits for the peer to read.
    pub(crate) fn set_blocked(&self, is_blocked: bool) {
        if is_blocked {
            self.state.fetch_or(BLOCKED, Ordering::AcqRel);
        } else {
            self.state.fetch_and(!BLOCKED, Ordering::AcqRel);
        }
    }

    /// The state, if the connection is idle. A greater state means a later use.
    fn idle_state(&self, now_ms: u64) -> Option<u64> {
        let state = self.state.load(Ordering::Acquire);
        let is_idle = state & (REQUEST | BLOCKED | EVICTED) == 0;
        (is_idle && (state >> FLAG_BITS) + IDLE_AFTER_MS <= now_ms).then_some(state)
    }

    /// Tells the connection to close, if it still has this idle state.
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

    fn is_busy(&self) -> bool {
        self.state.load(Ordering::Acquire) & (REQUEST | BLOCKED) != 0
    }
}

/// Ends a request when dropped.
#[derive(Debug)]
pub(crate) struct RequestGuard {
    connection: Arc<Connection>,
    /// The connection was evicted before the request began: the request must be refused.
    pub(crate) is_evicted: bool,
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        // While a request is in progress, only its own task changes the state.
        let flags = self.connection.state.load(Ordering::Acquire) & (BLOCKED | EVICTED);
        self.connection.state.store(now_ms() << FLAG_BITS | flags, Ordering::Release);
    }
}

/// Connections that are examined round-robin. Each one stores its index here as `indexes[KIND]`.
#[derive(Debug, Default)]
struct Ring<const KIND: usize> {
    members: Vec<Arc<Connection>>,
    /// The index to examine next.
    next: usize,
}

impl<const KIND: usize> Ring<KIND> {
    fn push(&mut self, connection: Arc<Connection>) {
        connection.indexes[KIND].store(self.members.len(), Ordering::Relaxed);
        self.members.push(connection);
    }

    fn remove(&mut self, connection: &Connection) {
        let index = connection.indexes[KIND].load(Ordering::Relaxed);
        self.members.swap_remove(index);
        if let Some(moved) = self.members.get(index) {
            moved.indexes[KIND].store(index, Ordering::Relaxed);
        }
    }

    /// Evicts an idle connection, if one is found.
    fn evict(&mut self, now_ms: u64) -> Option<Arc<Connection>> {
        let count = self.members.len();
        let (mut oldest, mut found) = (None, 0);
        for _ in 0..count.min(MAX_EXAMINED) {
            let index = self.next % count;
            self.next = index + 1;
            if let Some(state) = self.members[index].idle_state(now_ms) {
                oldest = Some(oldest.map_or((state, index), |found: (u64, usize)| found.min((state, index))));
                found += 1;
            }
            if found == SAMPLE {
                break;
            }
        }
        let (state, index) = oldest?;
        // Fails if a request has begun since. The caller does not look for another victim.
        self.members[index].evict(state).then(|| self.members[index].clone())
    }
}

#[derive(Debug, Default)]
struct OpenConnections {
    all: Ring<0>,
    by_address: HashMap<IpAddr, Ring<1>>,
}

impl OpenConnections {
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

    /// Removes a connection that was evicted.
    fn remove_evicted(&mut self, evicted: Option<&Connection>) -> bool {
        if let Some(evicted) = evicted {
            self.remove(evicted);
            metrics::counter!(EVICTED_TOTAL).increment(1);
        }
        evicted.is_some()
    }

    /// Evicts an idle connection. `false` if none is found.
    fn evict_one(&mut self, now_ms: u64) -> bool {
        let evicted = self.all.evict(now_ms);
        self.remove_evicted(evicted.as_deref())
    }
}

/// The open connections of a listener.
#[derive(Debug)]
pub(crate) struct Connections {
    max: usize,
    max_per_address: usize,
    open: Mutex<OpenConnections>,
}

impl Connections {
    pub(crate) fn new(max: usize, max_per_address: usize) -> Arc<Self> {
        // Registers both counters, so that they are exported before the first event.
        for name in [EVICTED_TOTAL, REFUSED_TOTAL] {
            metrics::counter!(name).increment(0);
        }
        Arc::new(Self { max, max_per_address, open: Mutex::default() })
    }

    /// Admits a new connection if there is room or if an idle one can be evicted. Without an address only the limit on all connections
    /// applies.
    pub(crate) fn admit(self: &Arc<Self>, address: Option<IpAddr>) -> Option<ConnectionGuard> {
        self.admit_at(address, now_ms())
    }

    fn admit_at(self: &Arc<Self>, address: Option<IpAddr>, now_ms: u64) -> Option<ConnectionGuard> {
        let mut open = self.open.lock();
        let ring = address.and_then(|address| open.by_address.get_mut(&address));
        let has_room = match ring {
            Some(ring) if ring.members.len() >= self.max_per_address => {
                let evicted = ring.evict(now_ms);
                open.remove_evicted(evicted.as_deref())
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
        Some(ConnectionGuard { connections: self.clone(), connection })
    }

    /// Evicts an idle connection, if one is found.
    pub(crate) fn evict_one(&self) {
        self.open.lock().evict_one(now_ms());
    }
}

/// Removes a connection when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionGuard {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
}

impl ConnectionGuard {
    pub(crate) const fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Serves the connection to its end, or until it is evicted. Requests begin and end only while `serving` is polled, so an idle
    /// connection stays idle until it is dropped.
    pub(crate) async fn until_evicted<F: Future>(self, serving: F) -> Option<F::Output> {
        let mut serving = pin!(serving);
        poll_fn(|cx| {
            self.connection.task.register(cx.waker());
            if let Poll::Ready(done) = serving.as_mut().poll(cx) {
                return Poll::Ready(Some(done));
            }
            let must_close = self.connection.is_evicted() && !self.connection.is_busy();
            if must_close { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        // An evicted connection was removed when it was evicted.
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

    /// A time long after everything that a test does.
    const LATER: u64 = 10_000_000;

    fn admit(connections: &Arc<Connections>, address: Option<IpAddr>, count: usize) -> Vec<ConnectionGuard> {
        (0..count).map_while(|_| connections.admit(address)).collect()
    }

    fn count(connections: &Connections) -> (usize, usize) {
        let open = connections.open.lock();
        (open.all.members.len(), open.by_address.values().map(|ring| ring.members.len()).sum())
    }

    fn evicted(held: &[ConnectionGuard]) -> Vec<bool> {
        held.iter().map(|one| one.connection().is_evicted()).collect()
    }

    #[test]
    fn connections_per_address_are_limited_except_for_proxies() {
        let connections = Connections::new(10, 3);
        let held = admit(&connections, A, 3);
        let requests: Vec<_> = held.iter().map(|one| one.connection().begin_request()).collect();
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
    fn least_recently_used_idle_connection_is_evicted() {
        let connections = Connections::new(4, 4);
        let held: Vec<_> = (0..4).map(|n| connections.admit_at(A, 400 - n * 100).unwrap()).collect();
        let busy = held[3].connection().begin_request();
        assert!(connections.admit_at(B, 250).is_none(), "none has been idle for long");
        let new = connections.admit_at(B, LATER).unwrap();
        assert_eq!(evicted(&held), [false, false, true, false]);
        let newer = connections.admit_at(B, LATER).unwrap();
        assert_eq!(evicted(&held), [false, true, true, false]);
        assert!(held[2].connection().begin_request().is_evicted, "too late");
        assert_eq!(count(&connections), (4, 4));
        drop((busy, held, new, newer));
        assert_eq!(count(&connections), (0, 0));
    }

    #[test]
    fn busy_connections_are_not_evicted() {
        let connections = Connections::new(2, 2);
        let held = admit(&connections, A, 2);
        let request = held[0].connection().begin_request();
        held[1].connection().set_blocked(true);
        assert!(connections.admit_at(B, LATER).is_none());
        held[1].connection().set_blocked(false);
        assert!(connections.admit_at(B, LATER).is_some());
        drop(request);
    }

    #[tokio::test]
    async fn evicted_connection_stops_serving() {
        let connections = Connections::new(1, 1);
        let first = connections.admit(A).unwrap();
        let serving = tokio::spawn(first.until_evicted(std::future::pending::<()>()));
        tokio::task::yield_now().await;
        let second = connections.admit_at(B, LATER).unwrap();
        assert!(serving.await.unwrap().is_none());
        assert_eq!(second.until_evicted(async { 7 }).await, Some(7));
    }
}
