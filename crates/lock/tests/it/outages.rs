//! Every kind of lock through the same outages, some of them with the default settings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_lock::{Config, Error, Locks, Result};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis};

use crate::kinds::{AnyGuard, KINDS, SINGLE, acquire, acquire_competing, acquire_with_ttl};
use crate::support::{SHORT, ask, calls, connect, example, until};

/// Three servers, with clients that reach them through proxies and competing clients that reach them directly.
struct Setup {
    /// Dropping them stops them.
    servers: Vec<Server>,
    proxies: Vec<Proxy>,
    proxied: Vec<Locks>,
    direct: Vec<Locks>,
}

impl Setup {
    async fn new(config: &Config) -> Self {
        let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
        let (mut proxies, mut proxied, mut direct) = (Vec::new(), Vec::new(), Vec::new());
        for server in &servers {
            let proxy = Proxy::start(server.address()).await.unwrap();
            proxied.push(Locks::connect(redis::url(proxy.address().port()), config.clone()).await.unwrap());
            direct.push(connect(server, config.clone()).await);
            proxies.push(proxy);
        }
        Self { servers, proxies, proxied, direct }
    }

    fn set(&self, fault: Fault) {
        self.proxies.iter().for_each(|proxy| proxy.set(fault));
    }

    async fn acquire_all(&self) -> Vec<AnyGuard> {
        let mut held = Vec::new();
        for kind in KINDS {
            held.push(acquire(kind, &self.proxied, Duration::from_secs(30)).await.unwrap());
        }
        held
    }
}

/// The given TTL in the fast tier of the tests, otherwise the default.
fn config_with_ttl(fast: Duration) -> Config {
    let default = Config::default();
    let watchdog_ttl = if count(1, 0) == 1 { default.watchdog_ttl } else { fast };
    Config { watchdog_ttl, ..default }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_is_renewed_after_a_reconnect() {
    let config = config_with_ttl(Duration::from_secs(3));
    let setup = Setup::new(&config).await;
    let held = setup.acquire_all().await;
    for _ in 0..2 {
        // A third of the TTL without a connection, then longer than the TTL with one.
        setup.set(Fault::Cut);
        tokio::time::sleep(config.watchdog_ttl / 3).await;
        setup.set(Fault::None);
        tokio::time::sleep(config.watchdog_ttl * 5 / 4).await;
        for (kind, held) in KINDS.iter().zip(&held) {
            assert!(held.is_valid(), "{kind} was not renewed after the cut");
            let rival = acquire_competing(kind, &setup.direct, Duration::ZERO).await;
            assert!(matches!(rival, Err(Error::NotAcquired { .. })), "{kind}: {:?}", rival.err());
        }
    }
    for (kind, held) in KINDS.iter().zip(held) {
        held.release().await.unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_reports_a_cut_longer_than_its_ttl_before_another_owner_acquires_it() {
    let config = config_with_ttl(Duration::from_secs(2));
    let setup = Setup::new(&config).await;
    let held: Vec<Arc<AnyGuard>> = setup.acquire_all().await.into_iter().map(Arc::new).collect();
    let lost: Vec<_> = held.iter().map(|held| tokio::spawn(held.lost())).collect();
    let rivals: Vec<_> = KINDS
        .iter()
        .zip(&held)
        .map(|(&kind, held)| {
            let (direct, held) = (setup.direct.clone(), held.clone());
            tokio::spawn(async move {
                let rival = acquire_competing(kind, &direct, Duration::from_secs(90)).await;
                (rival.unwrap_or_else(|error| panic!("{kind}: {error}")), held.is_valid())
            })
        })
        .collect();
    setup.set(Fault::Cut);
    let mut direct = Vec::new();
    for (kind, rival) in KINDS.iter().zip(rivals) {
        let (rival, both_valid) = rival.await.unwrap();
        assert!(!both_valid, "{kind}: valid for two owners");
        direct.push(rival);
    }
    for lost in lost {
        lost.await.unwrap();
    }
    setup.set(Fault::None);
    for (kind, held) in KINDS.iter().zip(held) {
        let held = Arc::into_inner(held).unwrap();
        assert!(held.release().await.is_err(), "{kind}: it was no longer held");
    }
    assert!(direct.iter().all(AnyGuard::is_valid), "the competing locks were left untouched");
    for rival in direct {
        rival.release().await.unwrap();
    }
    // The clients reconnect, and everything works again.
    for held in setup.acquire_all().await {
        held.release().await.unwrap();
    }
}

/// The reply to the first release is lost, so that it is repeated. What the repetition finds does not hide that the lock had expired before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_that_expired_is_reported_as_lost_although_a_reply_to_its_release_is_lost() {
    let config = Config { response_timeout: Duration::from_secs(10), ..Config::default() };
    let setup = Setup::new(&config).await;
    // Loads the scripts, so that a release is one command.
    for held in setup.acquire_all().await {
        held.release().await.unwrap();
    }
    for kind in KINDS {
        let used = if SINGLE.contains(&kind) { &setup.servers[..1] } else { &setup.servers[..] };
        for held_by_other in [false, true] {
            let held = acquire_with_ttl(kind, &setup.proxied, Duration::from_millis(200)).await.unwrap();
            held.lost().await;
            until("the lock has expired in Redis", async || nothing_held(&setup.servers)).await;
            let rival = match held_by_other {
                true => Some(acquire_competing(kind, &setup.direct, Duration::from_secs(10)).await.unwrap()),
                false => None,
            };
            let before: Vec<u64> = used.iter().map(|server| calls(server, "evalsha")).collect();
            setup.set(Fault::DropResponses);
            let releasing = tokio::spawn(held.release());
            until("Redis has executed the release", async || {
                used.iter().zip(&before).all(|(server, &before)| calls(server, "evalsha") > before)
            })
            .await;
            setup.set(Fault::None);
            setup.proxies.iter().for_each(Proxy::cut_all);
            let released = releasing.await.unwrap();
            assert!(matches!(released, Err(Error::Lost | Error::HeldByOther)), "{kind}, {held_by_other}: {released:?}");
            if let Some(rival) = rival {
                rival.release().await.unwrap_or_else(|error| panic!("{kind}: the competing lock is gone: {error}"));
            }
        }
    }
}

fn nothing_held(servers: &[Server]) -> bool {
    servers.iter().all(|server| ask(server, &["--raw", "keys", "lock:*"]).lines().all(|key| key.ends_with(":fence")))
}

/// A process is killed while it waits for several locks, or while it acquires them. What it may have acquired expires with its TTL.
async fn kill_while_waiting(kind: &str) {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let mut locks = Vec::new();
    for server in &servers {
        locks.push(connect(server, Config::default()).await);
    }
    let mut rng = StdRng::seed_from_u64(13);
    for round in 0..count(20, 4) {
        let guard = acquire(kind, &locks, Duration::from_secs(30)).await.unwrap();
        let urls: Vec<String> = servers.iter().map(|server| redis::url(server.port())).collect();
        let mut args = vec![kind, kind, "8", "1000"];
        args.extend(urls.iter().map(String::as_str));
        let mut node = example("contend", &args, Some(SHORT));
        until("it waits for the lock", async || {
            servers.iter().any(|server| ask(server, &["pubsub", "channels"]).contains(kind))
        })
        .await;
        if round % 2 == 0 {
            node.kill().unwrap();
            guard.release().await.unwrap();
        } else {
            guard.release().await.unwrap();
            tokio::time::sleep(Duration::from_micros(rng.random_range(0..30_000))).await;
            node.kill().unwrap();
        }
        let started = Instant::now();
        let next = acquire(kind, &locks, Duration::from_secs(20)).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(15), "{kind}: {:?}", started.elapsed());
        next.release().await.unwrap();
        until("all locks are free", async || nothing_held(&servers)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_killed_while_waiting_for_a_multi_lock_leaves_nothing_locked() {
    kill_while_waiting("multi").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_killed_while_waiting_for_a_redlock_leaves_nothing_locked() {
    kill_while_waiting("redlock").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timeout_of_50_ms_is_kept_while_redis_hangs() {
    let servers: Vec<Server> = (0..3).map(|_| redis::start().unwrap()).collect();
    let (mut locks, mut fresh) = (Vec::new(), Vec::new());
    for server in &servers {
        locks.push(connect(server, Config::default()).await);
        // These clients connect when they are first used.
        fresh.push(Locks::new(redis::url(server.port()), Config::default()).unwrap());
    }
    for kind in KINDS {
        acquire(kind, &locks, Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    }
    servers.iter().for_each(|server| server.signal("STOP").unwrap());
    let mut slow = Vec::new();
    for (which, clients) in [("connected", &locks), ("not connected", &fresh)] {
        for kind in KINDS {
            let started = Instant::now();
            let refused: Result<AnyGuard> = acquire(kind, clients, Duration::from_millis(50)).await;
            if !matches!(refused, Err(Error::Unreachable(_))) || started.elapsed() > Duration::from_millis(400) {
                slow.push((which, kind, started.elapsed(), refused.err()));
            }
        }
    }
    servers.iter().for_each(|server| server.signal("CONT").unwrap());
    assert!(slow.is_empty(), "{slow:?}");
    // The requests that arrived while Redis hung leave nothing behind, although the TTL is 30 s.
    until("all locks are free", async || nothing_held(&servers)).await;
    for kind in KINDS {
        acquire(kind, &fresh, Duration::from_secs(5)).await.unwrap().release().await.unwrap();
    }
}
