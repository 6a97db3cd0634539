//! The majority of a Redlock's servers: until when the lock is valid on them, without interruption.
//!
//! A server that restarted empty is acquired again. That restores the lock only if a majority of the other servers held it during the
//! whole gap, from the last time the server was known to hold it until now. Otherwise another owner may have held the lock in between;
//! then the lock is lost, and stays lost whatever is acquired afterwards.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Quorum {
    majority: usize,
    state: Mutex<State>,
    changed: Notify,
    /// Wake the watchdogs of the servers.
    watchdogs: Vec<Arc<Notify>>,
}

#[derive(Debug)]
struct State {
    /// One per server; `None` where the lock is not held.
    servers: Vec<Option<ServerLease>>,
    /// Servers that should be renewed at once.
    urgent: Vec<bool>,
    lost: bool,
}

/// The lock on one server.
#[derive(Debug, Clone, Copy)]
struct ServerLease {
    /// Held without interruption since then.
    held_since: Instant,
    /// When the last command was sent that renewed or acquired it.
    last_seen: Instant,
    valid_until: Instant,
}

impl Quorum {
    /// `acquired` has, for each server where the lock was acquired, the time at which the command was sent and the time until which the
    /// lock is valid.
    pub(crate) fn new(acquired: Vec<Option<(Instant, Instant)>>, majority: usize, watchdogs: Vec<Arc<Notify>>) -> Self {
        let first_sent = acquired.iter().flatten().map(|(sent, _)| *sent).min();
        let lease =
            |(sent, valid_until)| ServerLease { held_since: first_sent.unwrap_or(sent), last_seen: sent, valid_until };
        let servers: Vec<_> = acquired.into_iter().map(|acquired| acquired.map(lease)).collect();
        // Servers where the lock was not acquired are tried again at once.
        let urgent: Vec<_> = servers.iter().map(Option::is_none).collect();
        let state = State { servers, urgent, lost: false };
        Self { majority, state: Mutex::new(state), changed: Notify::new(), watchdogs }
    }

    /// Until when the majority is held. `None` if it is not held at `now`; then it never is again.
    pub(crate) fn valid_until(&self, now: Instant) -> Option<Instant> {
        self.state.lock().valid_until(self.majority, now)
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.valid_until(Instant::now()).is_some()
    }

    /// Records that a command sent at `sent` has renewed the lock on a server, or acquired it because the server did not have it
    /// (`was_empty`). Returns `false` if the lock is lost nevertheless.
    pub(crate) fn record_held(&self, server: usize, sent: Instant, valid_until: Instant, was_empty: bool) -> bool {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.expire(self.majority, now);
        if was_empty {
            state.remove(server, self.majority, now);
            // The lock survives the next empty restart only after every other server was seen later than this one.
            state.urgent.fill(true);
            self.wake_watchdogs();
        }
        if let Some(urgent) = state.urgent.get_mut(server) {
            *urgent = false;
        }
        if let Some(lease) = state.servers.get_mut(server) {
            let held_since = lease.map_or(now, |lease| lease.held_since);
            let valid_until = lease.map_or(valid_until, |lease| lease.valid_until.max(valid_until));
            *lease = Some(ServerLease { held_since, last_seen: sent, valid_until });
        }
        let valid = state.valid_until(self.majority, now).is_some();
        drop(state);
        self.changed.notify_waiters();
        valid
    }

    /// Makes the watchdogs renew urgent servers now.
    pub(crate) fn wake_watchdogs(&self) {
        self.watchdogs.iter().for_each(|watchdog| watchdog.notify_one());
    }

    /// Whether this server should be renewed at once.
    pub(crate) fn is_urgent(&self, server: usize) -> bool {
        self.state.lock().urgent.get(server).is_some_and(|&urgent| urgent)
    }

    /// Records that another owner holds the lock on a server.
    pub(crate) fn record_lost(&self, server: usize) {
        self.state.lock().remove(server, self.majority, Instant::now());
        self.changed.notify_waiters();
    }

    /// Marks the lock as released.
    pub(crate) fn end(&self) {
        self.state.lock().lost = true;
        self.changed.notify_waiters();
    }

    /// Waits until the majority is no longer held.
    pub(crate) async fn lost(&self) {
        loop {
            let changed = self.changed.notified();
            let Some(valid_until) = self.valid_until(Instant::now()) else { return };
            // The leases may be renewed before they expire.
            let _ = tokio::time::timeout_at(valid_until, changed).await;
        }
    }
}

impl State {
    fn valid_until(&mut self, majority: usize, now: Instant) -> Option<Instant> {
        self.expire(majority, now);
        let mut ends: Vec<Instant> = self.servers.iter().flatten().map(|lease| lease.valid_until).collect();
        ends.sort_unstable_by(|one, other| other.cmp(one));
        let valid_until = ends.get(majority.saturating_sub(1)).copied().filter(|_| !self.lost);
        self.lost |= valid_until.is_none();
        valid_until
    }

    fn expire(&mut self, majority: usize, now: Instant) {
        for server in 0..self.servers.len() {
            if self.servers[server].is_some_and(|lease| lease.valid_until <= now) {
                self.remove(server, majority, now);
            }
        }
    }

    /// A server has lost the lock at an unknown time since it was last seen to hold it.
    fn remove(&mut self, server: usize, majority: usize, now: Instant) {
        let Some(removed) = self.servers.get_mut(server).and_then(Option::take) else { return };
        let held_throughout = self
            .servers
            .iter()
            .flatten()
            .filter(|lease| lease.held_since <= removed.last_seen && lease.valid_until > now);
        self.lost |= held_throughout.count() < majority;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Three servers that hold the lock for 30 seconds, and a clock in seconds from now.
    fn three_servers() -> (Quorum, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |seconds| start + Duration::from_secs(seconds);
        (Quorum::new(vec![Some((at(0), at(30))); 3], 2, Vec::new()), at)
    }

    #[tokio::test]
    async fn lock_survives_servers_that_restart_empty_one_after_another() {
        let (quorum, at) = three_servers();
        for round in 0..3 {
            for server in 0..3 {
                assert!(quorum.record_held(server, Instant::now(), at(60), true), "{server} in round {round}");
                // Every server is seen once more before the next one restarts.
                for seen in 0..3 {
                    assert!(quorum.record_held(seen, Instant::now(), at(60), false));
                }
            }
        }
        assert!(quorum.is_valid());
    }

    #[tokio::test]
    async fn lock_is_lost_if_two_servers_restart_empty_within_one_renewal_interval() {
        let (quorum, at) = three_servers();
        assert!(quorum.record_held(0, Instant::now(), at(60), true), "the other two held it throughout");
        assert!(!quorum.record_held(1, Instant::now(), at(60), true), "the first may have been empty at the same time");
        assert!(!quorum.is_valid());
        quorum.lost().await;
    }

    #[tokio::test]
    async fn lost_lock_stays_lost() {
        let (quorum, at) = three_servers();
        assert_eq!(quorum.valid_until(at(0)), Some(at(30)));
        assert!(quorum.record_held(0, at(1), at(40), false));
        // Two of three servers are enough.
        quorum.record_lost(2);
        assert_eq!(quorum.valid_until(at(1)), Some(at(30)));
        assert!(quorum.record_held(1, at(1), at(40), false));
        assert_eq!(quorum.valid_until(at(39)), Some(at(40)));
        // Between the expiry of the leases and these renewals another owner may have held the lock.
        assert_eq!(quorum.valid_until(at(40)), None);
        assert!(!quorum.record_held(0, at(41), at(80), false) && !quorum.record_held(1, at(41), at(80), false));
        assert!(!quorum.is_valid());
        quorum.lost().await;
    }
}
