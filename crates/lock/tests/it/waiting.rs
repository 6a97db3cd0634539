use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Lock, Locks, Owner};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{ask, calls, connect, long, quiet, through, until};

/// The exclusive kinds by name.
const KINDS: [&str; 4] = ["simple", "reentrant", "fair", "write"];

/// A lock with a new owner.
fn lock(locks: &Locks, kind: &str) -> Lock {
    let owner = Owner::new();
    match kind {
        "simple" => locks.simple(kind).unwrap(),
        "reentrant" => locks.reentrant(kind, &owner).unwrap(),
        "fair" => locks.fair(kind, &owner).unwrap(),
        _ => locks.read_write(kind, &owner).unwrap().write().clone(),
    }
}

fn subscribers(server: &stampede_testkit::Server) -> usize {
    ask(server, &["pubsub", "channels"]).lines().filter(|line| !line.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_do_not_poll_and_all_acquire_the_lock() {
    let server = redis::start().unwrap();
    // The watchdog does not renew during the test.
    let config = Config { watchdog_ttl: Duration::from_secs(600), ..long() };
    let (holder, waiter) = (connect(&server, config.clone()).await, connect(&server, config).await);
    let mut guards = Vec::new();
    let mut waiting = Vec::new();
    for kind in KINDS {
        guards.push(lock(&holder, kind).lock().await.unwrap());
        for _ in 0..100 {
            let lock = lock(&waiter, kind);
            waiting.push(tokio::spawn(async move { lock.lock().await?.release().await }));
        }
    }
    until("all four channels are subscribed", async || subscribers(&server) == 4).await;
    // Every waiter has checked again after that.
    quiet(&server).await;
    let commands = || ask(&server, &["info", "stats"]).lines().find_stat("total_commands_processed:");
    let before = commands();
    tokio::time::sleep(Duration::from_millis(count(3000, 1000))).await;
    // The two INFO commands count too, and redis-cli sends one command of its own when it connects.
    let after = commands();
    assert!(after - before <= 4, "{} commands came from waiters", after - before);

    let started = Instant::now();
    for guard in guards {
        guard.release().await.unwrap();
    }
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(20), "a waiter waited for a lease to expire");
}

trait FindStat {
    fn find_stat(self, prefix: &str) -> u64;
}

impl<'a, I: Iterator<Item = &'a str>> FindStat for I {
    /// The number after the prefix.
    fn find_stat(mut self, prefix: &str) -> u64 {
        self.find_map(|line| line.trim().strip_prefix(prefix)).unwrap().parse().unwrap()
    }
}

#[tokio::test]
async fn hand_over_takes_two_scripts() {
    let server = redis::start().unwrap();
    let (holder, waiter) = (connect(&server, long()).await, connect(&server, long()).await);
    for kind in KINDS {
        // Loads the scripts.
        lock(&holder, kind).lock().await.unwrap().release().await.unwrap();
        let guard = lock(&holder, kind).lock().await.unwrap();
        let waited = lock(&waiter, kind);
        let waiting = tokio::spawn(async move { waited.lock().await });
        until("the waiter is subscribed", async || subscribers(&server) == 1).await;
        quiet(&server).await;
        let sent = || ["evalsha", "eval", "set", "subscribe"].map(|name| calls(&server, name));
        let before = sent();
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        let after = sent();
        // One to release, one to acquire. Commands called by scripts are counted too: `set` writes the fencing token.
        assert_eq!(after[0] - before[0], 2, "{kind}");
        assert_eq!((after[1], after[3]), (before[1], before[3]), "{kind}");
        guard.release().await.unwrap();
        until("the channel is unsubscribed", async || subscribers(&server) == 0).await;
    }
}

#[tokio::test]
async fn failed_acquire_returns_the_remaining_ttl() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for kind in KINDS {
        let lock = || lock(&locks, kind);
        let guard = lock().with_ttl(Duration::from_secs(5)).unwrap().lock().await.unwrap();
        let refused = lock().try_lock().await.unwrap_err();
        let Error::NotAcquired { remaining: Some(remaining) } = refused else { panic!("{kind}: {refused}") };
        assert!(remaining > Duration::from_secs(4) && remaining <= Duration::from_secs(5), "{kind}: {remaining:?}");
        assert!(refused.is_retryable());

        let started = Instant::now();
        assert!(matches!(lock().try_lock_for(Duration::from_millis(200)).await, Err(Error::NotAcquired { .. })));
        assert!(started.elapsed() >= Duration::from_millis(200), "{kind}: failed before the timeout");
        let started = Instant::now();
        let refused = lock().fail_fast().try_lock_for(Duration::from_secs(3)).await;
        assert!(matches!(refused, Err(Error::NotAcquired { .. })), "{kind}");
        assert!(started.elapsed() < Duration::from_secs(1), "{kind}: waited in spite of fail_fast");
        guard.release().await.unwrap();
    }
}

/// The lock is deleted without a message.
#[tokio::test]
async fn lost_message_delays_a_waiter_by_at_most_the_remaining_ttl() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for kind in KINDS {
        let lock = || lock(&locks, kind);
        let held = lock().with_ttl(Duration::from_millis(500)).unwrap().lock().await.unwrap();
        let started = Instant::now();
        let waiting = lock();
        let waiting = tokio::spawn(async move { waiting.lock().await });
        until("the waiter is subscribed", async || subscribers(&server) == 1).await;
        ask(&server, &["del", &format!("lock:{{{kind}}}")]);
        let guard = waiting.await.unwrap().unwrap();
        assert!(started.elapsed() < Duration::from_millis(1500), "{kind}: {:?}", started.elapsed());
        guard.release().await.unwrap();
        assert!(held.release().await.is_err(), "{kind}: it was no longer held");
        until("the channel is unsubscribed", async || subscribers(&server) == 0).await;
    }
}

/// The subscription breaks at the moment at which the lock is released.
#[tokio::test]
async fn waiters_check_after_a_broken_subscription() {
    let server = redis::start().unwrap();
    let (holder, waiter) = (connect(&server, long()).await, connect(&server, long()).await);
    for round in 0..count(50, 5) {
        let name = format!("lock-{round}");
        let guard = holder.simple(&name).unwrap().lock().await.unwrap();
        let lock = waiter.simple(&name).unwrap();
        let waiting = tokio::spawn(async move { lock.try_lock_for(Duration::from_secs(10)).await });
        until("the waiter is subscribed", async || ask(&server, &["pubsub", "channels"]).contains(&name)).await;
        ask(&server, &["client", "kill", "type", "pubsub"]);
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn invalid_names_and_ttls_are_rejected() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    assert!(matches!(locks.simple(""), Err(Error::InvalidArgument(_))));
    assert!(matches!(locks.simple("}{"), Err(Error::InvalidArgument(_))));
    assert!(matches!(locks.simple("a").unwrap().with_ttl(Duration::from_millis(9)), Err(Error::InvalidArgument(_))));
    locks.simple("with {braces} and spaces").unwrap().lock().await.unwrap().release().await.unwrap();
    // The key has another type.
    ask(&server, &["lpush", "lock:{list}", "x"]);
    for lock in [locks.simple("list").unwrap(), locks.reentrant("list", &Owner::new()).unwrap()] {
        let refused = lock.lock().await.unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{refused}");
        assert!(!refused.is_retryable());
    }
}

/// The connection of the subscription hangs. A ping detects it, and the client reconnects.
#[tokio::test]
async fn hanging_subscription_is_replaced() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let holder = connect(&server, long()).await;
    let guard = holder.simple("work").unwrap().lock().await.unwrap();
    let config = Config { watchdog_ttl: Duration::from_secs(2), ..long() };
    let waited = through(&proxy, config).await.simple("work").unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("the waiter is subscribed", async || subscribers(&server) == 1).await;
    quiet(&server).await;
    proxy.set(Fault::DropResponses);
    guard.release().await.unwrap();
    // Two pings are missed.
    tokio::time::sleep(Duration::from_millis(1600)).await;
    assert!(!waiting.is_finished());
    proxy.set(Fault::None);
    // The lease that it waits for lasts half a minute.
    let next = tokio::time::timeout(Duration::from_secs(8), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
}

/// A Redis user without permission to subscribe still acquires locks when leases expire, and does not reconnect in a tight loop.
#[tokio::test]
async fn waiter_without_permission_to_subscribe_waits_for_the_lease_to_expire() {
    let server = redis::start().unwrap();
    ask(&server, &["acl", "setuser", "mute", "on", ">secret", "~*", "+@all", "resetchannels"]);
    let url = format!("redis://mute:secret@127.0.0.1:{}/", server.port());
    let locks = Locks::connect(url, long()).await.unwrap();
    let lock = || locks.simple("work").unwrap();
    lock().lock().await.unwrap().release().await.unwrap();
    let guard = lock().with_ttl(Duration::from_millis(1500)).unwrap().lock().await.unwrap();
    let connections = || ask(&server, &["info", "stats"]).lines().find_stat("total_connections_received:");
    let before = connections();
    let next = lock().try_lock_for(Duration::from_secs(10)).await.unwrap();
    assert!(connections() - before < 20, "{} connections", connections() - before);
    next.release().await.unwrap();
    assert!(guard.release().await.is_err());
    // A wrong password is a permanent error.
    let url = format!("redis://mute:wrong@127.0.0.1:{}/", server.port());
    assert!(matches!(Locks::connect(url, long()).await, Err(Error::Refused(_))));
}
