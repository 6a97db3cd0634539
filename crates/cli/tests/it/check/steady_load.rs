//! Checks of a system under steady load: orders are being recorded in every pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stampede_core::SaleId;
use stampede_proof::history as recorded;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count};

use super::{check_with, failed, target};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, command, temporary_storage, verify};

/// Buyers who buy and cancel until they are stopped, each on one of the nodes.
fn steady_load(nodes: &[&Shop], buyers: Vec<Buyer>, sale: SaleId) -> SteadyLoad {
    let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
    let press = |(n, buyer): (usize, Buyer)| {
        let (history, stop, address) = (history.clone(), stop.clone(), nodes[n % nodes.len()].address);
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let bought = history.buy(&mut client, sale, &buyer).await;
                assert!(bought.response.is_confirmation(), "{bought:?}");
                history.cancel(&mut client, sale, &buyer, bought.order.unwrap()).await;
            }
            history.buy(&mut client, sale, &buyer).await;
        })
    };
    let tasks = buyers.into_iter().enumerate().map(press).collect();
    SteadyLoad { history, stop, tasks }
}

struct SteadyLoad {
    history: Arc<Recorder>,
    stop: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl SteadyLoad {
    async fn end(self) -> Arc<Recorder> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.history
    }
}

/// Orders are being recorded in every pass, and there are no findings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_findings_under_steady_load() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&[&shop], buyers, sale);
    let data = ["--data-dir".to_owned(), storage.path().display().to_string()];
    let begun = Instant::now();
    for _ in 0..count(20, 3) {
        assert_eq!(failed(&check_with(target(&shop).into()).await), [0; 0], "through its routes");
        let both = target(&shop).into_iter().chain(data.clone()).collect();
        assert_eq!(failed(&check_with(both).await), [0; 0], "with its database");
    }
    let history = load.end().await;
    let orders = history.count(Response::Created);
    assert!(orders > 100, "{orders} orders in {:?} are no load", begun.elapsed());

    // Afterwards everything matches, and every confirmation has its row.
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 24);
    let file = storage.path().join("history");
    recorded::write(&history.ended(), std::fs::File::create(&file).unwrap()).unwrap();
    let all = target(&shop).into_iter().chain(data).chain(["--history".into(), file.display().to_string()]).collect();
    assert_eq!(failed(&check_with(all).await), [0; 0]);
}

/// The same with two nodes of the tier `shared`, both of which are asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_findings_under_steady_load_on_two_nodes() {
    let nodes = Nodes::start(Kind::Postgres, 2);
    let sale = nodes.create_sale(1000).await;
    let buyers = nodes.shops[0].log_in(0, 24).await;
    let shops: Vec<&Shop> = nodes.shops.iter().collect();
    let load = steady_load(&shops, buyers, sale);
    let targets: Vec<String> = shops.iter().flat_map(|shop| target(shop)).collect();
    let begun = Instant::now();
    for _ in 0..count(20, 3) {
        assert_eq!(failed(&check_with(targets.clone()).await), [0; 0], "through their routes");
        let database = ["--database".to_owned(), nodes.storages[0].url()];
        let both = targets.iter().cloned().chain(database).collect();
        assert_eq!(failed(&check_with(both).await), [0; 0], "with their database");
    }
    let history = load.end().await;
    let orders = history.count(Response::Created);
    assert!(orders > 100, "{orders} orders in {:?} are no load", begun.elapsed());
    assert_eq!(nodes.verify(&history, sale).await, 24);
}

/// A real violation is found although orders are being recorded all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn violation_is_found_under_steady_load() {
    let storage = temporary_storage();
    let mut planted = command(&storage);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let shop = Shop::run(planted);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 24).await;
    let load = steady_load(&[&shop], buyers, sale);
    // A check that finds nothing ends with its first pass, and the bug sets a right cap at times. So the check is repeated.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let output = check_with(target(&shop).into()).await;
        if failed(&output) == [1] {
            break;
        }
        assert!(failed(&output).is_empty() && Instant::now() < deadline, "{output:?}");
    }
    load.end().await;
}

/// The gates of all nodes are compared, and the wrong one is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gates_of_all_nodes_are_compared() {
    let server = Kind::Postgres.server().unwrap();
    let url = Kind::Postgres.create_database(server, server.port());
    let (storage, other) = (Storage::with(Some(url.clone())), Storage::with(Some(url)));
    let right = Shop::open(&storage);
    let mut planted = command(&other);
    planted.env("STAMPEDE_PLANTED_BUGS", "reconcile-count");
    let wrong = Shop::run(planted);
    let sale = right.create_sale(1000).await;
    wrong.wait_for_sale(sale).await;
    let load = steady_load(&[&wrong], right.log_in(0, 24).await, sale);
    let both: Vec<String> = target(&right).into_iter().chain(target(&wrong)).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    // The bug has an effect only sometimes, so the check is repeated.
    loop {
        let output = check_with(both.clone()).await;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("the gate's cap is") && text.contains(&format!("at {}", wrong.address)) {
            assert_eq!(output.status.code(), Some(1));
            break;
        }
        assert!(Instant::now() < deadline, "{text}");
    }
    load.end().await;
    assert_eq!(failed(&check_with(target(&right).into()).await), [0; 0], "the other is right");
}
