//! Most of a red lock's servers: until when they are surely held, without a break.
//!
//! A server that came back empty is acquired again. That mends the lock only if most of the others held it all the while: from the last
//! time that the server was known to hold it, to now. Otherwise another may have had the lock in between; then it is lost, and stays so
//! whatever is acquired afterwards.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Quorum {
    most: usize,
    state: Mutex<State>,
    changed: Notify,
    /// Those who renew, to be woken.
    renewers: Vec<Arc<Notify>>,
}

#[derive(Debug)]
struct State {
    /// One for each server, `None` where the lock is not held.
    servers: Vec<Option<Held>>,
    /// Servers that should be renewed at once.
    urgent: Vec<bool>,
    lost: bool,
}

/// The lock on one server.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Held from then on without a break.
    since: Instant,
    /// When the last command was sent that found or made it held.
    seen: Instant,
    until: Instant,
}

impl Quorum {
    /// For each server when the command was sent that acquired the lock there, and until when it is held, if it was acquired.
    pub(crate) fn new(acquired: Vec<Option<(Instant, Instant)>>, most: usize, renewers: Vec<Arc<Notify>>) -> Self {
        let since = acquired.iter().flatten().map(|(sent, _)| *sent).min();
        let held = |(sent, until)| Held { since: since.unwrap_or(sent), seen: sent, until };
        let servers: Vec<_> = acquired.into_iter().map(|acquired| acquired.map(held)).collect();
        // What was not acquired is tried again at once.
        let urgent: Vec<_> = servers.iter().map(Option::is_none).collect();
        Self { most, state: Mutex::new(State { servers, urgent, lost: false }), changed: Notify::new(), renewers }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when most servers are surely held. `None` if they are not at this time, and from then on.
    pub(crate) fn sure_until(&self, now: Instant) -> Option<Instant> {
        self.state().sure_until(self.most, now)
    }

    pub(crate) fn is_sure(&self) -> bool {
        self.sure_until(Instant::now()).is_some()
    }

    /// A command sent at this time has renewed the lock on a server, or acquired it because the server knew nothing of it. `false` if
    /// the lock is lost nevertheless.
    pub(crate) fn held(&self, server: usize, sent: Instant, until: Instant, was_empty: bool) -> bool {
        let now = Instant::now();
        let mut state = self.state();
        state.expire(self.most, now);
        if was_empty {
            state.lose(server, self.most, now);
            // The next server may come back empty as soon as every other was seen after this one.
            state.urgent.fill(true);
            self.wake_renewers();
        }
        if let Some(urgent) = state.urgent.get_mut(server) {
            *urgent = false;
        }
        if let Some(known) = state.servers.get_mut(server) {
            let since = known.map_or(now, |known| known.since);
            let until = known.map_or(until, |known| known.until.max(until));
            *known = Some(Held { since, seen: sent, until });
        }
        let sure = state.sure_until(self.most, now).is_some();
        drop(state);
        self.changed.notify_waiters();
        sure
    }

    /// What is urgent is renewed now.
    pub(crate) fn wake_renewers(&self) {
        self.renewers.iter().for_each(|renewer| renewer.notify_one());
    }

    /// Should this server be renewed at once?
    pub(crate) fn is_urgent(&self, server: usize) -> bool {
        self.state().urgent.get(server).is_some_and(|&urgent| urgent)
    }

    /// Another holds the lock on a server.
    pub(crate) fn missed(&self, server: usize) {
        self.state().lose(server, self.most, Instant::now());
        self.changed.notify_waiters();
    }

    /// It is given back.
    pub(crate) fn end(&self) {
        self.state().lost = true;
        self.changed.notify_waiters();
    }

    /// Waits until most servers are not surely held any more.
    pub(crate) async fn lost(&self) {
        loop {
            let changed = self.changed.notified();
            let Some(until) = self.sure_until(Instant::now()) else { return };
            // By the end of that time it may have been renewed.
            let _ = tokio::time::timeout_at(until, changed).await;
        }
    }
}

impl State {
    fn sure_until(&mut self, most: usize, now: Instant) -> Option<Instant> {
        self.expire(most, now);
        let mut until: Vec<Instant> = self.servers.iter().flatten().map(|held| held.until).collect();
        until.sort_unstable_by(|one, other| other.cmp(one));
        let sure_until = until.get(most.saturating_sub(1)).copied().filter(|_| !self.lost);
        self.lost |= sure_until.is_none();
        sure_until
    }

    fn expire(&mut self, most: usize, now: Instant) {
        for server in 0..self.servers.len() {
            if self.servers[server].is_some_and(|held| held.until <= now) {
                self.lose(server, most, now);
            }
        }
    }

    /// A server has lost the lock since it was last seen to hold it, nobody knows when.
    fn lose(&mut self, server: usize, most: usize, now: Instant) {
        let Some(gone) = self.servers.get_mut(server).and_then(Option::take) else { return };
        let meanwhile = self.servers.iter().flatten().filter(|held| held.since <= gone.seen && held.until > now);
        self.lost |= meanwhile.count() < most;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Three servers that are held for thirty seconds, and a clock in seconds from now.
    fn three() -> (Quorum, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        let at = move |seconds| start + Duration::from_secs(seconds);
        (Quorum::new(vec![Some((at(0), at(30))); 3], 2, Vec::new()), at)
    }

    #[tokio::test]
    async fn servers_that_came_back_empty_one_after_another_are_mended() {
        let (quorum, at) = three();
        for round in 0..3 {
            for server in 0..3 {
                assert!(quorum.held(server, Instant::now(), at(60), true), "{server} in round {round}");
                // Every server is seen once more before the next one goes.
                for seen in 0..3 {
                    assert!(quorum.held(seen, Instant::now(), at(60), false));
                }
            }
        }
        assert!(quorum.is_sure());
    }

    #[tokio::test]
    async fn two_that_came_back_empty_within_one_renewal_lose_the_lock() {
        let (quorum, at) = three();
        assert!(quorum.held(0, Instant::now(), at(60), true), "the two others had it all the while");
        assert!(!quorum.held(1, Instant::now(), at(60), true), "the first may have been empty at the same time");
        assert!(!quorum.is_sure());
        quorum.lost().await;
    }

    #[tokio::test]
    async fn once_lost_it_stays_lost() {
        let (quorum, at) = three();
        assert_eq!(quorum.sure_until(at(0)), Some(at(30)));
        assert!(quorum.held(0, at(1), at(40), false));
        // One of three that another has, or that does not answer, is not needed.
        quorum.missed(2);
        assert_eq!(quorum.sure_until(at(1)), Some(at(30)));
        assert!(quorum.held(1, at(1), at(40), false));
        assert_eq!(quorum.sure_until(at(39)), Some(at(40)));
        // Between the end of the leases and these answers somebody else may have had it.
        assert_eq!(quorum.sure_until(at(40)), None);
        assert!(!quorum.held(0, at(41), at(80), false) && !quorum.held(1, at(41), at(80), false));
        assert!(!quorum.is_sure());
        quorum.lost().await;
    }
}
