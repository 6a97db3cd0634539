//! A master that is replaced while clients still reach it, with and without `Config::replicas` and `min-replicas-to-write`.

use std::time::Duration;

use stampede_lock::{Config, Error, Locks, Servers};
use stampede_testkit::redis::Replicated;
use stampede_testkit::{count, redis};

use crate::kinds::{SINGLE, lock};
use crate::support::{SHORT, ask, connect, until};

fn config(replicas: usize) -> Config {
    Config {
        watchdog_ttl: Duration::from_secs(2),
        response_timeout: Duration::from_millis(400),
        replicas,
        ..Config::default()
    }
}

/// Promotes the replica while the old master keeps running.
async fn split(servers: &Replicated) {
    ask(&servers.replica, &["replicaof", "no", "one"]);
    until("the replica is a master", async || ask(&servers.replica, &["role"]).starts_with("master")).await;
}

#[tokio::test]
async fn two_owners_hold_the_lock_while_the_old_master_is_reachable_as_documented() {
    let servers = redis::start_replicated().unwrap();
    servers.sentinel.kill().unwrap();
    let (old, new) = (connect(&servers.master, config(0)).await, connect(&servers.replica, config(0)).await);
    split(&servers).await;
    let first = old.reentrant("work", &stampede_lock::Owner::new()).unwrap().lock().await.unwrap();
    let second = new.reentrant("work", &stampede_lock::Owner::new()).unwrap().lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(count(20, 4))).await;
    assert!(first.is_valid() && second.is_valid(), "both are renewed for as long as the partition lasts");
    first.release().await.unwrap();
    second.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_confirmed_replicas_the_lock_survives_the_failover_and_the_old_master_renews_nothing() {
    let servers = redis::start_replicated().unwrap();
    servers.sentinel.kill().unwrap();
    let (old, new) = (connect(&servers.master, config(1)).await, connect(&servers.replica, config(0)).await);
    let mut held = Vec::new();
    for kind in SINGLE {
        held.push(lock(kind, &old, kind).lock().await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(held.iter().all(|guard| guard.is_valid()), "renewed while the replica confirms");
    split(&servers).await;
    // The new master has all of them, so no other owner acquires one before its lease expires; by then its holder knows.
    let rivals: Vec<_> = SINGLE
        .into_iter()
        .zip(held)
        .map(|(kind, guard)| {
            let rival = lock(if kind == "read" { "write" } else { kind }, &new, kind);
            tokio::spawn(async move {
                let rival = rival.try_lock_for(Duration::from_secs(20)).await.unwrap();
                assert!(!guard.is_valid(), "{kind}: valid for two owners");
                guard.lost().await;
                rival
            })
        })
        .collect();
    for rival in rivals {
        rival.await.unwrap().release().await.unwrap();
    }
    // The old master grants no new locks.
    let mut refused = lock("simple", &old, "another").try_lock().await.unwrap_err();
    for _ in 0..10 {
        if matches!(refused, Error::NotReplicated { .. }) {
            break;
        }
        // On a busy machine the reply of `WAIT` may exceed the short response timeout.
        refused = lock("simple", &old, "another").try_lock().await.unwrap_err();
    }
    assert!(matches!(refused, Error::NotReplicated { required: 1, confirmed: 0 }), "{refused}");
    assert!(refused.is_retryable());
    until("the unconfirmed lock is released", async || ask(&servers.master, &["exists", "lock:{another}"]) == "0")
        .await;
}

#[tokio::test]
async fn with_min_replicas_to_write_the_old_master_renews_nothing() {
    let servers = redis::start_replicated().unwrap();
    servers.sentinel.kill().unwrap();
    ask(&servers.master, &["config", "set", "min-replicas-to-write", "1", "min-replicas-max-lag", "1"]);
    let old = connect(&servers.master, Config { watchdog_ttl: Duration::from_secs(4), ..config(0) }).await;
    let guard = lock("reentrant", &old, "work").lock().await.unwrap();
    split(&servers).await;
    guard.lost().await;
    let refused = lock("simple", &old, "another").try_lock().await.unwrap_err();
    assert!(matches!(refused, Error::Unreachable(_)), "{refused}");
    assert!(refused.is_retryable());
}

/// A client with Sentinel finds the new master as soon as the old one can no longer confirm.
#[tokio::test]
async fn sentinel_client_moves_to_the_new_master_when_a_lock_is_not_confirmed() {
    let group = redis::start_replicated().unwrap();
    let sentinels = vec![redis::url(group.sentinel.port())];
    let servers = Servers::Sentinel { sentinels, master: redis::MASTER.to_owned(), node: None };
    let locks = Locks::connect(servers, Config { watchdog_ttl: SHORT, ..config(1) }).await.unwrap();
    lock("simple", &locks, "work").lock().await.unwrap().release().await.unwrap();
    // The old master keeps running and loses its replica. The sentinel refuses a failover until it has discovered the replica.
    let failover = async || redis::ask(group.sentinel.port(), &["sentinel", "failover", redis::MASTER]).is_ok();
    until("the sentinel promotes the replica", failover).await;
    let port = group.replica.port().to_string();
    until("the sentinel announces it", async || {
        ask(&group.sentinel, &["sentinel", "get-master-addr-by-name", redis::MASTER]).contains(&port)
    })
    .await;
    // The old master becomes a replica of the new one, and confirms.
    let guard = lock("simple", &locks, "work").try_lock_for(Duration::from_secs(60)).await.unwrap();
    assert_eq!(ask(&group.replica, &["exists", "lock:{work}"]), "1");
    guard.release().await.unwrap();
}
