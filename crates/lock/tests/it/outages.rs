//! Every kind of lock through the same outages, several of them also at the settings that it has by default.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_lock::{Config, Error, Locks, Result};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Dice, Proxy, Server, count, redis};

use crate::kinds::{Held, KINDS, hold, hold_rival};
use crate::support::{SHORT, ask, connect, example, until};

/// Three servers; the clients of one party reach them through proxies, those of the other directly.
struct Field {
    /// They end with the test.
    _servers: Vec<Server>,
    proxies: Vec<Proxy>,
    mine: Vec<Locks>,
    theirs: Vec<Locks>,
}

impl Field {
    async fn new(config: &Config) -> Self {
        let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
        let (mut proxies, mut mine, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for server in &servers {
            let proxy = Proxy::start(server.address()).await.unwrap();
            mine.push(Locks::connect(redis::url(proxy.address().port()), config.clone()).await.unwrap());
            theirs.push(connect(server, config.clone()).await);
            proxies.push(proxy);
        }
        Self { _servers: servers, proxies, mine, theirs }
    }

    fn set(&self, fault: Fault) {
        self.proxies.iter().for_each(|proxy| proxy.set(fault));
    }

    async fn hold_all(&self) -> Vec<Held> {
        let mut held = Vec::new();
        for kind in KINDS {
            held.push(hold(kind, &self.mine, Duration::from_secs(30)).await.unwrap());
        }
        held
    }
}

/// The leases of the fast tier, or those that are the default.
fn lease(fast: Duration) -> Config {
    let default = Config::default();
    let watchdog_lease = if count(1, 0) == 1 { default.watchdog_lease } else { fast };
    Config { watchdog_lease, ..default }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_goes_on_after_a_reconnect_for_every_kind() {
    let config = lease(Duration::from_secs(3));
    let field = Field::new(&config).await;
    let held = field.hold_all().await;
    for _ in 0..2 {
        // A third of the lease without a connection, then longer than the lease with one.
        field.set(Fault::Cut);
        tokio::time::sleep(config.watchdog_lease / 3).await;
        field.set(Fault::None);
        tokio::time::sleep(config.watchdog_lease * 5 / 4).await;
        for (kind, held) in KINDS.iter().zip(&held) {
            assert!(held.is_sure(), "{kind} was not renewed after the cut");
            let rival = hold_rival(kind, &field.theirs, Duration::ZERO).await;
            assert!(matches!(rival, Err(Error::NotAcquired { .. })), "{kind}: {:?}", rival.err());
        }
    }
    for (kind, held) in KINDS.iter().zip(held) {
        held.release().await.unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_longer_than_the_lease_is_known_before_another_holds_for_every_kind() {
    let config = lease(Duration::from_secs(2));
    let field = Field::new(&config).await;
    let held: Vec<Arc<Held>> = field.hold_all().await.into_iter().map(Arc::new).collect();
    let lost: Vec<_> = held.iter().map(|held| tokio::spawn(held.lost())).collect();
    let rivals: Vec<_> = KINDS
        .iter()
        .zip(&held)
        .map(|(&kind, held)| {
            let (theirs, held) = (field.theirs.clone(), held.clone());
            tokio::spawn(async move {
                let rival = hold_rival(kind, &theirs, Duration::from_secs(90)).await;
                (rival.unwrap_or_else(|error| panic!("{kind}: {error}")), held.is_sure())
            })
        })
        .collect();
    field.set(Fault::Cut);
    let mut theirs = Vec::new();
    for (kind, rival) in KINDS.iter().zip(rivals) {
        let (rival, both_sure) = rival.await.unwrap();
        assert!(!both_sure, "{kind}: two were sure");
        theirs.push(rival);
    }
    for lost in lost {
        lost.await.unwrap();
    }
    field.set(Fault::None);
    for (kind, held) in KINDS.iter().zip(held) {
        let held = Arc::into_inner(held).unwrap();
        assert!(held.release().await.is_err(), "{kind}: it was not held any more");
    }
    assert!(theirs.iter().all(Held::is_sure), "what others hold was left alone");
    for rival in theirs {
        rival.release().await.unwrap();
    }
    // The connections are made again, and everything works over them.
    for held in field.hold_all().await {
        held.release().await.unwrap();
    }
}

fn nothing_held(servers: &[Server]) -> bool {
    servers.iter().all(|server| ask(server, &["--raw", "keys", "lock:*"]).lines().all(|key| key.ends_with(":fence")))
}

/// A process dies while it waits for several locks, or in the moment in which it gets them. What it may have got of them ends with its
/// lease.
async fn killed_while_waiting(kind: &str) {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let mut locks = Vec::new();
    for server in &servers {
        locks.push(connect(server, Config::default()).await);
    }
    let mut dice = Dice::new(13);
    for round in 0..count(20, 4) {
        let guard = hold(kind, &locks, Duration::from_secs(30)).await.unwrap();
        let urls: Vec<String> = servers.iter().map(|server| redis::url(server.port())).collect();
        let mut args = vec![kind, kind, "8", "1000"];
        args.extend(urls.iter().map(String::as_str));
        let mut node = example("contend", &args, Some(SHORT));
        until("it waits", || servers.iter().any(|server| ask(server, &["pubsub", "channels"]).contains(kind))).await;
        if round % 2 == 0 {
            node.kill().unwrap();
            guard.release().await.unwrap();
        } else {
            guard.release().await.unwrap();
            tokio::time::sleep(Duration::from_micros(dice.within(0..30_000))).await;
            node.kill().unwrap();
        }
        let started = Instant::now();
        let next = hold(kind, &locks, Duration::from_secs(20)).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(15), "{kind}: {:?}", started.elapsed());
        next.release().await.unwrap();
        until("nothing is left of it", || nothing_held(&servers)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_while_it_waits_for_a_multi_lock_leaves_nothing() {
    killed_while_waiting("multi").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_while_it_waits_for_a_red_lock_leaves_nothing() {
    killed_while_waiting("red").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_of_50_ms_ends_in_time_while_redis_stands_still() {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let (mut locks, mut fresh) = (Vec::new(), Vec::new());
    for server in &servers {
        locks.push(connect(server, Config::default()).await);
        // This one connects when it is first used.
        fresh.push(Locks::new(redis::url(server.port()), Config::default()).unwrap());
    }
    for kind in KINDS {
        hold(kind, &locks, Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    }
    servers.iter().for_each(|server| server.signal("STOP").unwrap());
    let mut slow = Vec::new();
    for (which, clients) in [("connected", &locks), ("not connected", &fresh)] {
        for kind in KINDS {
            let started = Instant::now();
            let refused: Result<Held> = hold(kind, clients, Duration::from_millis(50)).await;
            if !matches!(refused, Err(Error::Unreachable(_))) || started.elapsed() > Duration::from_millis(400) {
                slow.push((which, kind, started.elapsed(), refused.err()));
            }
        }
    }
    servers.iter().for_each(|server| server.signal("CONT").unwrap());
    assert!(slow.is_empty(), "{slow:?}");
    // What was asked of it while it stood still leaves nothing behind, though the leases last 30 s.
    until("all is free", || nothing_held(&servers)).await;
    for kind in KINDS {
        hold(kind, &fresh, Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    }
}
