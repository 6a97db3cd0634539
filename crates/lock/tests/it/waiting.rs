use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Lock, Locks, Owner};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, count, redis};

use crate::support::{ask, calls, connect, long, quiet, through, until};

/// The four kinds by their names, each for somebody else every time.
const KINDS: [&str; 4] = ["simple", "reentrant", "fair", "write"];

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
async fn waiting_does_not_poll_and_everybody_gets_it() {
    let server = redis::start().unwrap();
    // The watchdog does not come by meanwhile.
    let config = Config { watchdog_lease: Duration::from_secs(600), ..long() };
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
    until("all four channels are subscribed", || subscribers(&server) == 4).await;
    // Everybody has looked again after that.
    quiet(&server).await;
    let commands = || ask(&server, &["info", "stats"]).lines().next_line("total_commands_processed:");
    let before = commands();
    tokio::time::sleep(Duration::from_millis(count(3000, 1000))).await;
    // The two questions themselves are a command each; redis-cli asks one of its own at the start of each connection.
    let after = commands();
    assert!(after - before <= 4, "{} commands came from those who wait", after - before);

    let started = Instant::now();
    for guard in guards {
        guard.release().await.unwrap();
    }
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(20), "somebody waited for a lease to end");
}

trait NextLine {
    fn next_line(self, prefix: &str) -> u64;
}

impl<'a, I: Iterator<Item = &'a str>> NextLine for I {
    /// The number behind the prefix.
    fn next_line(mut self, prefix: &str) -> u64 {
        self.find_map(|line| line.trim().strip_prefix(prefix)).unwrap().parse().unwrap()
    }
}

#[tokio::test]
async fn a_waiter_gets_it_with_two_round_trips() {
    let server = redis::start().unwrap();
    let (holder, waiter) = (connect(&server, long()).await, connect(&server, long()).await);
    for kind in KINDS {
        // Redis knows the scripts.
        lock(&holder, kind).lock().await.unwrap().release().await.unwrap();
        let guard = lock(&holder, kind).lock().await.unwrap();
        let waited = lock(&waiter, kind);
        let waiting = tokio::spawn(async move { waited.lock().await });
        until("it waits", || subscribers(&server) == 1).await;
        quiet(&server).await;
        let sent = || ["evalsha", "eval", "set", "subscribe"].map(|name| calls(&server, name));
        let before = sent();
        guard.release().await.unwrap();
        let guard = waiting.await.unwrap().unwrap();
        let after = sent();
        // One to release, one to get it. What the scripts themselves call is counted with their own names: `set` writes the fence.
        assert_eq!(after[0] - before[0], 2, "{kind}");
        assert_eq!((after[1], after[3]), (before[1], before[3]), "{kind}");
        guard.release().await.unwrap();
        until("the subscription is given up", || subscribers(&server) == 0).await;
    }
}

#[tokio::test]
async fn who_does_not_get_it_hears_for_how_long() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for kind in KINDS {
        let lock = || lock(&locks, kind);
        let guard = lock().with_lease(Duration::from_secs(5)).unwrap().lock().await.unwrap();
        let refused = lock().try_lock().await.unwrap_err();
        let Error::NotAcquired { remaining: Some(remaining) } = refused else { panic!("{kind}: {refused}") };
        assert!(remaining > Duration::from_secs(4) && remaining <= Duration::from_secs(5), "{kind}: {remaining:?}");
        assert!(refused.may_retry());

        let started = Instant::now();
        assert!(matches!(lock().lock_within(Duration::from_millis(200)).await, Err(Error::NotAcquired { .. })));
        assert!(started.elapsed() >= Duration::from_millis(200), "{kind}: gave up too early");
        let started = Instant::now();
        let refused = lock().give_up_early().lock_within(Duration::from_secs(3)).await;
        assert!(matches!(refused, Err(Error::NotAcquired { .. })), "{kind}");
        assert!(started.elapsed() < Duration::from_secs(1), "{kind}: waited though it was told not to");
        guard.release().await.unwrap();
    }
}

/// The lock is deleted behind everybody's back: nobody is told.
#[tokio::test]
async fn a_lost_message_costs_at_most_the_remaining_lease() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    for kind in KINDS {
        let lock = || lock(&locks, kind);
        let held = lock().with_lease(Duration::from_millis(500)).unwrap().lock().await.unwrap();
        let started = Instant::now();
        let waiting = lock();
        let waiting = tokio::spawn(async move { waiting.lock().await });
        until("it waits", || subscribers(&server) == 1).await;
        ask(&server, &["del", &format!("lock:{{{kind}}}")]);
        let guard = waiting.await.unwrap().unwrap();
        assert!(started.elapsed() < Duration::from_millis(1500), "{kind}: {:?}", started.elapsed());
        guard.release().await.unwrap();
        assert!(held.release().await.is_err(), "{kind}: it was not held any more");
        until("the subscription is given up", || subscribers(&server) == 0).await;
    }
}

/// The subscription breaks, and in that moment the lock is released.
#[tokio::test]
async fn a_broken_subscription_is_made_anew_and_everybody_looks() {
    let server = redis::start().unwrap();
    let (holder, waiter) = (connect(&server, long()).await, connect(&server, long()).await);
    for round in 0..count(50, 5) {
        let name = format!("lock-{round}");
        let guard = holder.simple(&name).unwrap().lock().await.unwrap();
        let lock = waiter.simple(&name).unwrap();
        let waiting = tokio::spawn(async move { lock.lock_within(Duration::from_secs(10)).await });
        until("it waits", || ask(&server, &["pubsub", "channels"]).contains(&name)).await;
        ask(&server, &["client", "kill", "type", "pubsub"]);
        guard.release().await.unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn names_and_leases_that_cannot_be_used_are_refused() {
    let server = redis::start().unwrap();
    let locks = connect(&server, long()).await;
    assert!(matches!(locks.simple(""), Err(Error::Setting(_))));
    assert!(matches!(locks.simple("}{"), Err(Error::Setting(_))));
    assert!(matches!(locks.simple("a").unwrap().with_lease(Duration::from_millis(9)), Err(Error::Setting(_))));
    locks.simple("with {braces} and spaces").unwrap().lock().await.unwrap().release().await.unwrap();
    // The key is something else.
    ask(&server, &["lpush", "lock:{list}", "x"]);
    for lock in [locks.simple("list").unwrap(), locks.reentrant("list", &Owner::new()).unwrap()] {
        let refused = lock.lock().await.unwrap_err();
        assert!(matches!(refused, Error::Refused(_)), "{refused}");
        assert!(!refused.may_retry());
    }
}

/// The subscription's connection is there and says nothing any more. It is asked for a sign of life, and made anew.
#[tokio::test]
async fn a_silent_subscription_is_noticed() {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let holder = connect(&server, long()).await;
    let guard = holder.simple("work").unwrap().lock().await.unwrap();
    let config = Config { watchdog_lease: Duration::from_secs(2), ..long() };
    let waited = through(&proxy, config).await.simple("work").unwrap();
    let waiting = tokio::spawn(async move { waited.lock().await });
    until("it waits", || subscribers(&server) == 1).await;
    quiet(&server).await;
    proxy.set(Fault::DropAnswers);
    guard.release().await.unwrap();
    // Two signs of life are missed.
    tokio::time::sleep(Duration::from_millis(1600)).await;
    assert!(!waiting.is_finished());
    proxy.set(Fault::None);
    // The lease that it was told of lasts half a minute.
    let next = tokio::time::timeout(Duration::from_secs(8), waiting).await.unwrap().unwrap().unwrap();
    next.release().await.unwrap();
}

/// A user of Redis who may not subscribe still gets locks, later; and does not come back every moment to ask.
#[tokio::test]
async fn who_may_not_subscribe_waits_for_the_lease() {
    let server = redis::start().unwrap();
    ask(&server, &["acl", "setuser", "mute", "on", ">secret", "~*", "+@all", "resetchannels"]);
    let url = format!("redis://mute:secret@127.0.0.1:{}/", server.port());
    let locks = Locks::connect(url, long()).await.unwrap();
    let lock = || locks.simple("work").unwrap();
    lock().lock().await.unwrap().release().await.unwrap();
    let guard = lock().with_lease(Duration::from_millis(1500)).unwrap().lock().await.unwrap();
    let connections = || ask(&server, &["info", "stats"]).lines().next_line("total_connections_received:");
    let before = connections();
    let next = lock().lock_within(Duration::from_secs(10)).await.unwrap();
    assert!(connections() - before < 20, "{} connections", connections() - before);
    next.release().await.unwrap();
    assert!(guard.release().await.is_err());
    // A wrong password does not mend by waiting.
    let url = format!("redis://mute:wrong@127.0.0.1:{}/", server.port());
    assert!(matches!(Locks::connect(url, long()).await, Err(Error::Refused(_))));
}
