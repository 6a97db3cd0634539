//! A cluster whose replies are lost, whose nodes fail, and whose slots migrate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use stampede_lock::{Config, Error, Locks, Servers};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, count, redis};

use crate::kinds::{SINGLE, lock};
use crate::support::{ask, until};

fn cluster(nodes: &[Server]) -> Servers {
    Servers::Cluster(nodes.iter().map(|node| redis::url(node.port())).collect())
}

/// The redis crate would send the release again and get the reply that the lock is not held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_whose_reply_is_lost_is_not_reported_as_a_lost_lock() {
    let nodes = redis::start_cluster().unwrap();
    let mut proxies = Vec::new();
    for node in &nodes {
        let proxy = Proxy::start(node.address()).await.unwrap();
        // Clients are redirected to the proxy; the nodes talk to each other over their cluster bus ports.
        ask(node, &["config", "set", "cluster-announce-port", &proxy.address().port().to_string()]);
        proxies.push(proxy);
    }
    let announced = |node: &Server| {
        let slots = ask(node, &["cluster", "slots"]);
        proxies.iter().all(|proxy| slots.contains(&proxy.address().port().to_string()))
    };
    until("every node redirects clients to the proxies", async || nodes.iter().all(announced)).await;
    let urls = proxies.iter().map(|proxy| redis::url(proxy.address().port())).collect();
    let config = Config { response_timeout: Duration::from_secs(10), ..Config::default() };
    let locks = Locks::connect(Servers::Cluster(urls), config).await.unwrap();
    for round in 0..count(20, 2) {
        for kind in SINGLE {
            let name = format!("{kind}-{round}");
            let one = lock(kind, &locks, &name);
            // Loads the scripts.
            one.lock().await.unwrap().release().await.unwrap();
            let guard = one.lock().await.unwrap();
            let key = if kind == "read" { format!("lock:{{{name}}}:readers") } else { format!("lock:{{{name}}}") };
            let held = || nodes.iter().any(|node| redis::ask(node.port(), &["exists", &key]).is_ok_and(|is| is == "1"));
            assert!(held());
            proxies.iter().for_each(|proxy| proxy.set(Fault::DropResponses));
            let releasing = tokio::spawn(guard.release());
            until("Redis has executed the release", async || !held()).await;
            proxies.iter().for_each(|proxy| {
                proxy.set(Fault::None);
                proxy.cut_all();
            });
            releasing.await.unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// How many keys the masters and the replicas have.
fn sizes(nodes: &[Server]) -> (u64, u64) {
    let (mut masters, mut replicas) = (0, 0);
    for node in nodes {
        let size: u64 = ask(node, &["dbsize"]).parse().unwrap();
        *if ask(node, &["role"]).starts_with("master") { &mut masters } else { &mut replicas } += size;
    }
    (masters, replicas)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_survive_the_failover_of_a_node_to_its_replica() {
    let nodes = redis::start_replicated_cluster().unwrap();
    let ttl = Duration::from_secs(15);
    let config = Config { watchdog_ttl: ttl, ..Config::default() };
    let (mine, theirs) = (
        Locks::connect(cluster(&nodes), config.clone()).await.unwrap(),
        Locks::connect(cluster(&nodes), config).await.unwrap(),
    );
    let mut held = Vec::new();
    for number in 0..6 {
        for kind in SINGLE {
            let name = format!("{kind}-{number}");
            let guard = lock(kind, &mine, &name).lock().await.unwrap();
            let rival = lock(if kind == "read" { "write" } else { kind }, &theirs, &name);
            let waiting = tokio::spawn(async move { rival.try_lock_for(Duration::from_secs(60)).await });
            held.push((name, guard, waiting));
        }
    }
    until("the replicas have the locks", async || {
        let (masters, replicas) = sizes(&nodes);
        masters == replicas && masters >= 30
    })
    .await;
    let failed = nodes.iter().find(|node| ask(node, &["role"]).starts_with("master")).unwrap();
    assert_ne!(ask(failed, &["dbsize"]), "0");
    failed.kill().unwrap();
    let remaining: Vec<&Server> = nodes.iter().filter(|node| node.port() != failed.port()).collect();
    until("its replica has taken over", async || {
        let masters = remaining.iter().filter(|node| ask(node, &["role"]).starts_with("master")).count();
        masters == 3 && remaining.iter().all(|node| ask(node, &["cluster", "info"]).contains("cluster_state:ok"))
    })
    .await;
    // Without a renewal on the new master every lease would have expired.
    tokio::time::sleep(ttl).await;
    for (name, guard, waiting) in held {
        assert!(guard.is_valid(), "{name} was not renewed");
        assert!(!waiting.is_finished(), "{name}: two owners hold it");
        guard.release().await.unwrap_or_else(|error| panic!("{name}: {error}"));
        waiting.await.unwrap().unwrap_or_else(|error| panic!("{name}: {error}")).release().await.unwrap();
    }
}

/// Locks are held, renewed and handed over while their slots migrate to another node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_work_while_their_slots_migrate() {
    let slots = usize::try_from(count(5000, 600)).unwrap();
    let nodes = Arc::new(redis::start_cluster().unwrap());
    let config = Config { watchdog_ttl: Duration::from_secs(5), ..Config::default() };
    let locks = Locks::connect(cluster(&nodes[..]), config).await.unwrap();
    // Names in the first slots, which are the ones that migrate.
    let moving = |name: &str| ask(&nodes[0], &["cluster", "keyslot", name]).parse::<usize>().unwrap() < slots;
    let names: Vec<String> =
        (0..).map(|number| format!("work-{number}")).filter(|name| moving(name)).take(2 * SINGLE.len()).collect();
    let (held_names, busy_names) = names.split_at(SINGLE.len());
    let mut held = Vec::new();
    for (kind, name) in SINGLE.into_iter().zip(held_names) {
        held.push(lock(kind, &locks, name).lock().await.unwrap());
    }
    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut working = Vec::new();
    for (kind, name) in SINGLE.into_iter().zip(busy_names).filter(|(kind, _)| *kind != "read") {
        let inside = Arc::new(AtomicU64::new(0));
        for _ in 0..3 {
            let (locks, name, inside) = (locks.clone(), name.clone(), inside.clone());
            let (stop, rounds) = (stop.clone(), rounds.clone());
            working.push(tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let guard = lock(kind, &locks, &name).lock().await?;
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "{kind}: two owners hold it");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await?;
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
                Ok::<(), Error>(())
            }));
        }
    }
    until("the tasks make progress", async || rounds.load(Ordering::SeqCst) > 20).await;
    let before = rounds.load(Ordering::SeqCst);
    let moved = nodes.clone();
    tokio::task::spawn_blocking(move || redis::reshard(&moved[0], &moved[1], slots)).await.unwrap().unwrap();
    assert!(rounds.load(Ordering::SeqCst) > before, "no progress during the migration: the test proves nothing");
    let after = rounds.load(Ordering::SeqCst);
    until("the tasks make progress after the migration", async || rounds.load(Ordering::SeqCst) > after + 20).await;
    stop.store(true, Ordering::SeqCst);
    for task in working {
        task.await.unwrap().unwrap();
    }
    for (guard, kind) in held.into_iter().zip(SINGLE) {
        assert!(guard.is_valid(), "{kind} was not renewed");
        guard.release().await.unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
    let here = ask(&nodes[1], &["cluster", "countkeysinslot", &ask(&nodes[0], &["cluster", "keyslot", &names[1]])]);
    assert_ne!(here, "0", "the fencing token of a lock has migrated with its slot");
}
