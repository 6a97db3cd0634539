//! However many waiters a lock has, an acquisition costs Redis a few scripts: one to acquire it, one to release it, and in most kinds one or two
//! before it waits.

use stampede_lock::{Config, Error, Lock, Locks, Owner};
use stampede_testkit::{Server, redis};

use crate::support::{calls, connect, quiet};

fn scripts(server: &Server) -> u64 {
    calls(server, "evalsha") + calls(server, "eval")
}

/// Counts scripts until every waiter has acquired and released the lock: since the first waiter, and since the first release. The first
/// lock is held until all others wait.
async fn count_scripts(server: &Server, locks: Vec<Lock>) -> (u64, u64) {
    // Loads the scripts and opens the connections.
    for lock in &locks {
        lock.lock().await.unwrap().release().await.unwrap();
    }
    let guard = locks[0].lock().await.unwrap();
    let start = scripts(server);
    let waiting: Vec<_> = locks[1..]
        .iter()
        .map(|lock| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.lock().await?.release().await })
        })
        .collect();
    quiet(server).await;
    let held = scripts(server);
    guard.release().await.unwrap();
    for task in waiting {
        task.await.unwrap().unwrap();
    }
    (scripts(server) - start, scripts(server) - held)
}

async fn default_client() -> (Server, Locks) {
    let server = redis::start().unwrap();
    let locks = connect(&server, Config::default()).await;
    (server, locks)
}

/// Allows this many scripts per acquisition, plus 10 %.
fn assert_linear(what: &str, acquisitions: usize, scripts: u64, each: u64) {
    let number = u64::try_from(acquisitions).unwrap();
    let most = each * number + number / 10 + 10;
    eprintln!("{what}: {scripts} scripts for {number} acquisitions, at most {most}");
    assert!(scripts <= most, "{what}: {scripts} scripts for {number} acquisitions, more than {most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clones_of_a_simple_lock_cost_two_scripts_each() {
    let (server, locks) = default_client().await;
    for number in [10, 200] {
        let lock = locks.simple("work").unwrap();
        let (all, since_release) = count_scripts(&server, vec![lock; number + 1]).await;
        assert_linear("simple locks in all", number, all, 2);
        assert_linear("simple locks after the release", number, since_release, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_cost_three_scripts_each() {
    let (server, locks) = default_client().await;
    for number in [10, 200] {
        let writer = |_| locks.read_write("work", &Owner::new()).unwrap().write().clone();
        let (all, since_release) = count_scripts(&server, (0..=number).map(writer).collect()).await;
        assert_linear("writers in all", number, all, 3);
        assert_linear("writers after the release", number, since_release, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_kinds_cost_two_to_four_scripts_each() {
    let (server, locks) = default_client().await;
    let number = 100;
    let reentrant = |_| locks.reentrant("reentrant", &Owner::new()).unwrap();
    let (all, scripts) = count_scripts(&server, (0..=number).map(reentrant).collect()).await;
    assert_linear("re-entrant locks in all", number, all, 3);
    assert_linear("re-entrant locks after the release", number, scripts, 2);
    let fair = |_| locks.fair("fair", &Owner::new()).unwrap();
    let (all, scripts) = count_scripts(&server, (0..=number).map(fair).collect()).await;
    assert_linear("fair locks in all", number, all, 4);
    assert_linear("fair locks after the release", number, scripts, 2);
    // Readers and writers alternate, behind a writer.
    let mixed = |index: usize| {
        let lock = locks.read_write("mixed", &Owner::new()).unwrap();
        if index.is_multiple_of(2) { lock.write().clone() } else { lock.read().clone() }
    };
    let (_, scripts) = count_scripts(&server, (0..=number).map(mixed).collect()).await;
    assert_linear("readers and writers", number, scripts, 3);
}

/// A message reaches every client, and one waiter of each checks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_several_clients_cost_one_check_per_client() {
    let server = redis::start().unwrap();
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(connect(&server, Config::default()).await.simple("work").unwrap());
    }
    let number = 60;
    let locks = clients.into_iter().cycle().take(number + 1).collect();
    let (_, scripts) = count_scripts(&server, locks).await;
    assert_linear("simple locks of three clients", number, scripts, 4);
}

/// Each of two tasks that take turns queues while the other one is still registered as a waiter, so the channel stays subscribed, and no
/// check after subscribing is needed: one script to queue, one to acquire, one to release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alternating_owners_cost_three_scripts_each() {
    let (server, locks) = default_client().await;
    locks.fair("work", &Owner::new()).unwrap().lock().await.unwrap().release().await.unwrap();
    let rounds = 200;
    let before = scripts(&server);
    let tasks: Vec<_> = (0..2)
        .map(|_| {
            let lock = locks.fair("work", &Owner::new()).unwrap();
            tokio::spawn(async move {
                for _ in 0..rounds {
                    lock.lock().await?.release().await?;
                }
                Ok::<(), Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_linear("alternating owners", 2 * rounds, scripts(&server) - before, 3);
}
