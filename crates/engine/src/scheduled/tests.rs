//! Two nodes on a real Redis and a real ledger: one at a time works, and one that has lost its lock changes nothing.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{Fenced, ScheduledWork};
use stampede_core::{Clock as _, SystemClock};
use stampede_ledger::{Database, open};
use stampede_lock::{Config, Locks};
use stampede_testkit::{Server, redis, until};

use super::Schedule;
use crate::workers;

const WORK: ScheduledWork = ScheduledWork::DeleteExpired;

fn schedule(server: &Server) -> Schedule {
    let config = Config { prefix: "test".to_owned(), ..Config::default() };
    let locks = Locks::new(redis::url(server.port()), config).unwrap();
    Schedule::new(WORK, Some(&locks)).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_works_and_a_node_without_its_lock_is_refused() {
    let (server, folder) = (redis::start().unwrap(), tempfile::tempdir().unwrap());
    let accounts = open(&Database::Sqlite(folder.path().join("db"))).await.unwrap().accounts;
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
    let worker = tokio::spawn(workers::expired::run(accounts.clone(), clock, other));
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
