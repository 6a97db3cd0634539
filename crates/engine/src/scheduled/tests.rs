//! Two nodes on a real Redis and a real ledger: one at a time works, and one that has lost its lock changes nothing.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{Fenced, ScheduledWork, SessionId};
use stampede_core::{Clock, Phone, SystemClock, Timestamp, User, UserId};
use stampede_ledger::{Database, open};
use stampede_lock::{Config, Locks};
use stampede_testkit::{Server, redis, until};

use super::Schedule;
use crate::workers;

const WORK: ScheduledWork = ScheduledWork::DeleteExpired;

fn schedule(server: &Server) -> Schedule {
    schedule_of(WORK, server)
}

fn schedule_of(work: ScheduledWork, server: &Server) -> Schedule {
    let config = Config { prefix: "test".to_owned(), ..Config::default() };
    let locks = Locks::new(redis::url(server.port()), config).unwrap();
    Schedule::new(work, Some(&locks)).unwrap()
}

/// The lock only avoids double work: it is kept while Redis answers, and not needed otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_is_safe_at_once_goes_on_without_redis() {
    let server = redis::start().unwrap();
    for work in [ScheduledWork::ExpireOrders, ScheduledWork::DeliverEvents] {
        let (one, other) = (schedule_of(work, &server), schedule_of(work, &server));
        let permit = one.begin().await.unwrap();
        assert!(other.begin().await.is_none(), "one at a time");
        permit.end().await;
        server.kill().unwrap();
        for schedule in [&one, &other] {
            let permit = schedule.begin().await.expect("no lock is needed");
            assert!(permit.fence().is_none());
            permit.end().await;
        }
        server.restart().unwrap();
        until("one at a time again", async || {
            let (first, second) = (one.begin().await, other.begin().await);
            let is_one = first.is_some() && second.is_none();
            for permit in [first, second].into_iter().flatten() {
                permit.end().await;
            }
            is_one
        })
        .await;
    }
}

/// A clock that is a day ahead.
#[derive(Debug)]
struct Ahead;

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        SystemClock.now().plus(Duration::from_secs(24 * 3600))
    }
}

/// Only what has expired by the clock of the database as well is deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_clock_is_ahead_deletes_no_valid_session() {
    let (server, folder) = (redis::start().unwrap(), tempfile::tempdir().unwrap());
    let stores = open(&Database::Sqlite(folder.path().join("db"))).await.unwrap();
    let (accounts, now) = (stores.accounts.clone(), SystemClock.now());
    let user = |n: i64| User {
        id: UserId::new(n).unwrap(),
        phone: Phone::parse(&format!("1380013800{n}")).unwrap(),
        nickname: format!("user_{n}"),
    };
    let (long_ago, hour) = (now.minus(Duration::from_secs(7200)), Duration::from_secs(3600));
    let (ended, valid) = (SessionId([1; 16]), SessionId([2; 16]));
    accounts.open_sessions(&[user(1)], &[ended], now.minus(hour), long_ago).await.unwrap();
    accounts.open_sessions(&[user(2)], &[valid], now.plus(hour), long_ago).await.unwrap();
    assert!(accounts.session(ended, long_ago).await.unwrap().is_some());
    let work = workers::expired::run(accounts.clone(), stores.ledger, Arc::new(Ahead), schedule(&server));
    let worker = tokio::spawn(work);
    until("what has expired is deleted", async || accounts.session(ended, long_ago).await.unwrap().is_none()).await;
    assert!(accounts.session(valid, now).await.unwrap().is_some());
    worker.abort();
}

/// A node is killed that has the lock for cancelling unpaid orders: another one goes on soon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_of_expiry_ends_soon() {
    let server = redis::start().unwrap();
    let work = ScheduledWork::ExpireOrders;
    let (one, other) = (schedule_of(work, &server), schedule_of(work, &server));
    let _held = one.begin().await.unwrap();
    let waited = until("the lock ends", async || other.begin().await.is_some()).await;
    assert!(waited < Duration::from_secs(10), "{waited:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_works_and_a_node_without_its_lock_is_refused() {
    let (server, folder) = (redis::start().unwrap(), tempfile::tempdir().unwrap());
    let stores = open(&Database::Sqlite(folder.path().join("db"))).await.unwrap();
    let (accounts, ledger) = (stores.accounts, stores.ledger);
    let (one, other) = (schedule(&server), schedule(&server));
    let permit = one.begin().await.unwrap();
    assert!(other.begin().await.is_none(), "one at a time");
    permit.end().await;
    let late = other.begin().await.unwrap();
    let now = SystemClock.now();
    assert_eq!(accounts.delete_expired(late.fence(), now).await.unwrap(), Fenced::Done(0));

    // Redis loses the lock, as at a fail-over, and the other node begins before the holder notices.
    redis::ask(server.port(), &["flushall"]).unwrap();
    let next = one.begin().await.unwrap();
    assert!(next.fence().unwrap().token > late.fence().unwrap().token);
    assert_eq!(accounts.delete_expired(next.fence(), now).await.unwrap(), Fenced::Done(0));
    assert_eq!(accounts.delete_expired(late.fence(), now).await.unwrap(), Fenced::Superseded);
    assert_eq!(accounts.delete_expired(next.fence(), now).await.unwrap(), Fenced::Done(0));
    late.end().await;
    assert!(other.begin().await.is_none(), "the end of a lost permit frees nothing of another's");
    next.end().await;

    // Without Redis no node works; the worker continues once it is back.
    server.kill().unwrap();
    assert!(one.begin().await.is_none());
    server.restart().unwrap();
    let clock = Arc::new(SystemClock);
    let worker = tokio::spawn(workers::expired::run(accounts.clone(), ledger, clock, other));
    let again = async || one.begin().await;
    until("the lock is free again", async || {
        let permit = again().await;
        let is_free = permit.is_some();
        if let Some(permit) = permit {
            permit.end().await;
        }
        is_free
    })
    .await;
    worker.abort();
    let _ = tokio::time::timeout(Duration::from_secs(5), worker).await;
}
