//! All kinds of locks on a cluster.

use std::time::Duration;

use stampede_lock::{Config, Locks, MultiLock, Owner, Servers};
use stampede_testkit::{count, redis};

use crate::support::{ask, long};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_works_on_a_cluster() {
    let nodes = redis::start_cluster().unwrap();
    let urls: Vec<String> = nodes.iter().map(|node| redis::url(node.port())).collect();
    // The TTL is long, so a waiter that acquires a lock within a few seconds was notified.
    let locks = Locks::connect(Servers::Cluster(urls.clone()), long()).await.unwrap();
    let others = Locks::connect(Servers::Cluster(urls.clone()), long()).await.unwrap();
    let mut used = [false; 3];
    // Enough names to use every node.
    for number in 0..count(200, 12) {
        let (owner, other) = (Owner::new(), Owner::new());
        let name = |kind: &str| format!("{kind}-{number}");
        let held = [
            locks.simple(&name("simple")).unwrap(),
            locks.reentrant(&name("reentrant"), &owner).unwrap(),
            locks.fair(&name("fair"), &owner).unwrap(),
            locks.read_write(&name("rw"), &owner).unwrap().write().clone(),
        ];
        let competing = [
            others.simple(&name("simple")).unwrap(),
            others.reentrant(&name("reentrant"), &other).unwrap(),
            others.fair(&name("fair"), &other).unwrap(),
            others.read_write(&name("rw"), &other).unwrap().read().clone(),
        ];
        for (held, competing) in held.into_iter().zip(competing) {
            let guard = held.lock().await.unwrap();
            assert!(competing.try_lock().await.is_err());
            let waiting = tokio::spawn(async move { competing.try_lock_for(Duration::from_secs(5)).await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
        let both = MultiLock::new(vec![
            locks.reentrant(&name("a"), &owner).unwrap(),
            locks.reentrant(&name("b"), &owner).unwrap(),
        ]);
        both.unwrap().lock().await.unwrap().release().await.unwrap();
        for (used, node) in used.iter_mut().zip(&nodes) {
            *used |= ask(node, &["dbsize"]) != "0";
        }
    }
    assert_eq!(used, [true; 3], "the names used only some of the nodes");
    // Renewal works on a cluster, too.
    let config = Config { watchdog_ttl: Duration::from_secs(2), ..long() };
    let locks = Locks::connect(Servers::Cluster(urls), config).await.unwrap();
    let held = locks.reentrant("long", &Owner::new()).unwrap().lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(held.is_valid());
    drop(held);
    let free = others.reentrant("long", &Owner::new()).unwrap().try_lock_for(Duration::from_secs(5)).await.unwrap();
    free.release().await.unwrap();
}
