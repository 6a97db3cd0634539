//! A master that is replaced while clients still reach it, and what `Config::replicas` and `min-replicas-to-write` do about it.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks, Servers};
use stampede_testkit::redis::Watched;
use stampede_testkit::{count, redis};

use crate::kinds::{SINGLE, lock};
use crate::support::{SHORT, ask, connect, until};

fn config(replicas: usize) -> Config {
    Config {
        watchdog_lease: Duration::from_secs(2),
        answer_within: Duration::from_millis(400),
        replicas,
        ..Config::default()
    }
}

/// The replica becomes a master; the old one goes on, alone, and some clients do not know.
async fn split(watched: &Watched) {
    ask(&watched.replica, &["replicaof", "no", "one"]);
    until("it is a master", || ask(&watched.replica, &["role"]).starts_with("master")).await;
}

#[tokio::test]
async fn with_an_old_master_still_reachable_two_hold_the_lock_as_documented() {
    let watched = redis::start_watched().unwrap();
    watched.sentinel.kill().unwrap();
    let (old, new) = (connect(&watched.master, config(0)).await, connect(&watched.replica, config(0)).await);
    split(&watched).await;
    let first = old.reentrant("work", &stampede_lock::Owner::new()).unwrap().lock().await.unwrap();
    let second = new.reentrant("work", &stampede_lock::Owner::new()).unwrap().lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(count(20, 4))).await;
    assert!(first.is_sure() && second.is_sure(), "both are renewed for as long as anybody watches");
    first.release().await.unwrap();
    second.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_confirmed_replicas_an_old_master_renews_nothing_and_the_lock_outlives_the_change() {
    let watched = redis::start_watched().unwrap();
    watched.sentinel.kill().unwrap();
    let (old, new) = (connect(&watched.master, config(1)).await, connect(&watched.replica, config(0)).await);
    let mut held = Vec::new();
    for kind in SINGLE {
        held.push(lock(kind, &old, kind).lock().await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(held.iter().all(|guard| guard.is_sure()), "renewed while the replica confirms");
    split(&watched).await;
    // The new master knows of all of them, so that nobody gets one before its lease ends; and by then their holders know.
    let rivals: Vec<_> = SINGLE
        .into_iter()
        .zip(held)
        .map(|(kind, guard)| {
            let rival = lock(if kind == "read" { "write" } else { kind }, &new, kind);
            tokio::spawn(async move {
                let rival = rival.lock_within(Duration::from_secs(20)).await.unwrap();
                assert!(!guard.is_sure(), "{kind}: two are sure");
                guard.lost().await;
                rival
            })
        })
        .collect();
    for rival in rivals {
        rival.await.unwrap().release().await.unwrap();
    }
    // On the old one there are no new locks.
    let refused = lock("simple", &old, "another").try_lock().await.unwrap_err();
    assert!(matches!(refused, Error::NotReplicated { wanted: 1, confirmed: 0 }), "{refused}");
    assert!(refused.may_retry());
    until("what it got is released", || ask(&watched.master, &["exists", "lock:{another}"]) == "0").await;
}

#[tokio::test]
async fn with_min_replicas_to_write_an_old_master_renews_nothing() {
    let watched = redis::start_watched().unwrap();
    watched.sentinel.kill().unwrap();
    ask(&watched.master, &["config", "set", "min-replicas-to-write", "1", "min-replicas-max-lag", "1"]);
    let old = connect(&watched.master, Config { watchdog_lease: Duration::from_secs(4), ..config(0) }).await;
    let guard = lock("reentrant", &old, "work").lock().await.unwrap();
    split(&watched).await;
    guard.lost().await;
    let refused = lock("simple", &old, "another").try_lock().await.unwrap_err();
    assert!(matches!(refused, Error::Unreachable(_)), "{refused}");
    assert!(refused.may_retry());
}

/// A client that asks the sentinels finds the new master as soon as the old one cannot confirm any more.
#[tokio::test]
async fn by_sentinel_a_lock_that_is_not_confirmed_is_asked_for_at_the_new_master() {
    let watched = redis::start_watched().unwrap();
    let sentinels = vec![redis::url(watched.sentinel.port())];
    let servers = Servers::Sentinel { sentinels, master: redis::MASTER.to_owned(), node: None };
    let locks = Locks::connect(servers, Config { watchdog_lease: SHORT, ..config(1) }).await.unwrap();
    lock("simple", &locks, "work").lock().await.unwrap().release().await.unwrap();
    // The old master lives, and loses its replica.
    // The sentinel may have to hear from the replica first.
    let failover = || redis::ask(watched.sentinel.port(), &["sentinel", "failover", redis::MASTER]).is_ok();
    until("the sentinel promotes the replica", failover).await;
    let port = watched.replica.port().to_string();
    until("the sentinel tells so", || {
        ask(&watched.sentinel, &["sentinel", "get-master-addr-by-name", redis::MASTER]).contains(&port)
    })
    .await;
    // It comes back as the replica of the new one, and confirms.
    let guard = lock("simple", &locks, "work").lock_within(Duration::from_secs(60)).await.unwrap();
    assert_eq!(ask(&watched.replica, &["exists", "lock:{work}"]), "1");
    guard.release().await.unwrap();
}
