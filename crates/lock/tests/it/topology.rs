//! The same locks on a cluster.

use std::time::Duration;

use stampede_lock::{Config, Locks, Multi, Owner, Servers};
use stampede_testkit::{count, redis};

use crate::support::{ask, long};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_works_on_a_cluster() {
    let nodes = redis::start_cluster().unwrap();
    let urls: Vec<String> = nodes.iter().map(|node| redis::url(node.port())).collect();
    // Whoever gets a lock within a few seconds was told: the leases last longer.
    let locks = Locks::connect(Servers::Cluster(urls.clone()), long()).await.unwrap();
    let others = Locks::connect(Servers::Cluster(urls.clone()), long()).await.unwrap();
    let mut used = [false; 3];
    // Names enough to meet every node.
    for number in 0..count(200, 12) {
        let (me, them) = (Owner::new(), Owner::new());
        let name = |kind: &str| format!("{kind}-{number}");
        let mine = [
            locks.simple(&name("simple")).unwrap(),
            locks.reentrant(&name("reentrant"), &me).unwrap(),
            locks.fair(&name("fair"), &me).unwrap(),
            locks.read_write(&name("rw"), &me).unwrap().write().clone(),
        ];
        let theirs = [
            others.simple(&name("simple")).unwrap(),
            others.reentrant(&name("reentrant"), &them).unwrap(),
            others.fair(&name("fair"), &them).unwrap(),
            others.read_write(&name("rw"), &them).unwrap().read().clone(),
        ];
        for (mine, theirs) in mine.into_iter().zip(theirs) {
            let guard = mine.lock().await.unwrap();
            assert!(theirs.try_lock().await.is_err());
            let waiting = tokio::spawn(async move { theirs.lock_within(Duration::from_secs(5)).await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard.release().await.unwrap();
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
        let both =
            Multi::new(vec![locks.reentrant(&name("a"), &me).unwrap(), locks.reentrant(&name("b"), &me).unwrap()]);
        both.unwrap().lock().await.unwrap().release().await.unwrap();
        for (used, node) in used.iter_mut().zip(&nodes) {
            *used |= ask(node, &["dbsize"]) != "0";
        }
    }
    assert_eq!(used, [true; 3], "the names met only some of the nodes");
    // Renewal works there, too.
    let config = Config { watchdog_lease: Duration::from_secs(2), ..long() };
    let locks = Locks::connect(Servers::Cluster(urls), config).await.unwrap();
    let held = locks.reentrant("long", &Owner::new()).unwrap().lock().await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(held.is_sure());
    drop(held);
    let free = others.reentrant("long", &Owner::new()).unwrap().lock_within(Duration::from_secs(5)).await.unwrap();
    free.release().await.unwrap();
}
