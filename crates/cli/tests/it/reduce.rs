//! Reductions of stock: under load, never below what is sold, and completed after a crash between the steps.
//!
//! - [`locked`]: another client has locked the sale

mod locked;

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, until};
use tokio::task::JoinHandle;

use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, command, read_only, temporary_storage, verify};

/// The points at which a node dies: after the ledger's first step, and after the gate.
const BETWEEN_THE_STEPS: [&str; 2] = ["reduce.ledger", "reduce.gate"];

fn reduction(remove: u32, request_id: &str) -> Value {
    json!({ "remove": remove, "request_id": request_id })
}

/// Each buyer buys and cancels again until `stop`, then keeps what they can get.
fn load(
    shop: &Shop,
    history: &Arc<Recorder>,
    sale: SaleId,
    buyers: &[Buyer],
    stop: &Arc<AtomicBool>,
) -> Vec<JoinHandle<()>> {
    let tasks = buyers.iter().map(|buyer| {
        let (history, buyer, address, stop) = (history.clone(), buyer.clone(), shop.address, stop.clone());
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            while !stop.load(Ordering::Relaxed) {
                let attempt = history.buy(&mut client, sale, &buyer).await;
                if let Some(order) = attempt.order.filter(|_| attempt.response.is_confirmation()) {
                    history.cancel(&mut client, sale, &buyer, order).await;
                }
            }
            history.buy(&mut client, sale, &buyer).await;
        })
    });
    tasks.collect()
}

async fn end(load: Vec<JoinHandle<()>>, stop: &AtomicBool) {
    stop.store(true, Ordering::Relaxed);
    for task in load {
        task.await.unwrap();
    }
}

/// The cap and the total in the ledger.
async fn stock(storage: &Storage, sale: SaleId) -> (u32, u32) {
    let ledger = read_only(storage).await;
    let sale = ledger.sale(sale).await.unwrap().unwrap();
    ledger.close().await;
    (sale.cap, sale.total)
}

/// The stock falls by what is asked for, and what is sold stays sold; a request is carried out once.
async fn stock_is_reduced_under_load(kind: Kind) {
    let storage = Storage::on(kind);
    let shop = Shop::open(&storage);
    let buyers = shop.log_in(0, 20).await;
    let sale = shop.create_sale(100).await;
    let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
    let load = load(&shop, &history, sale, &buyers, &stop);
    until("the sale runs", async || history.count(Response::Created) > 20).await;
    let path = format!("sales/{sale}/reduce");
    for _ in 0..2 {
        let reduced = shop.admin(&path, &reduction(70, "r1")).await;
        assert_eq!((reduced.status.as_u16(), &reduced.json()["total"]), (200, &json!(30)), "{:?}", reduced.body);
    }
    assert_eq!(shop.admin(&path, &reduction(60, "r1")).await.text("code"), "request_id_reused");
    let reused = json!({ "add": 70, "request_id": "r1" });
    assert_eq!(shop.admin(&format!("sales/{sale}/top-ups"), &reused).await.text("code"), "request_id_reused");
    assert_eq!(shop.admin(&path, &reduction(31, "r2")).await.text("code"), "illegal_step");
    assert_eq!(shop.admin(&path, &reduction(0, "r3")).await.text("code"), "invalid_request");
    assert_eq!(shop.admin(&path, &reduction(1, "no spaces")).await.text("code"), "invalid_request");
    // There may be more marks than 5: the rest stays.
    let reduced = shop.admin(&path, &reduction(25, "r4")).await.json();
    let total = reduced["total"].as_u64().unwrap();
    assert!((5..=20).contains(&total), "{reduced}");
    end(load, &stop).await;
    assert_eq!(stock(&storage, sale).await, (total as u32, total as u32));
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 20.min(total as usize));
    // Nothing that is sold is taken away.
    let reduced = shop.admin(&path, &reduction(total as u32, "r5")).await.json();
    assert_eq!(reduced["total"], json!(20.min(total)));
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 20.min(total as usize));
    assert!(shop.stop().success());
}

on_each_database!(stock_is_reduced_under_load);

fn dying_at(point: &str, mut command: Command) -> Command {
    command.env("STAMPEDE_FAILPOINTS", format!("{point}=abort"));
    command
}

/// The request reaches a process that dies on the way.
async fn request_and_die(mut shop: Shop, sale: SaleId, remove: u32) {
    let path = format!("/admin/v1/sales/{sale}/reduce");
    let answer = shop.client().await.post(&path, crate::shop::TOKEN, &reduction(remove, "r")).await;
    assert!(answer.is_err(), "{answer:?}");
    assert!(!shop.process.wait(Duration::from_secs(10)).unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reduction_is_completed_by_the_next_start() {
    for point in BETWEEN_THE_STEPS {
        let storage = temporary_storage();
        let shop = Shop::run(dying_at(point, command(&storage)));
        let buyers = shop.log_in(0, 3).await;
        let sale = shop.create_sale(10).await;
        let history = Recorder::default();
        for buyer in &buyers {
            assert_eq!(history.buy(&mut shop.client().await, sale, buyer).await.response, Response::Created);
        }
        request_and_die(shop, sale, 9).await;
        assert_eq!(stock(&storage, sale).await, (1, 10), "{point}");
        let shop = Shop::open(&storage);
        until("the reduction is completed", async || stock(&storage, sale).await == (3, 3)).await;
        let repeated = shop.admin(&format!("sales/{sale}/reduce"), &reduction(9, "r")).await;
        assert_eq!((repeated.status.as_u16(), &repeated.json()["total"]), (200, &json!(3)), "{point}");
        assert_eq!(verify(&history, &storage, &[&shop], sale).await, 3);
        assert!(shop.stop().success());
    }
}

/// A node dies between the steps under load; another completes the reduction, and sells what is left.
async fn reduction_is_completed_by_another_node(kind: Kind) {
    for point in BETWEEN_THE_STEPS {
        let mut nodes =
            Nodes::start_with(kind, 2, |n, command| if n == 1 { dying_at(point, command) } else { command });
        let buyers = nodes.shops[0].log_in(0, 20).await;
        let sale = nodes.create_sale(100).await;
        let (history, stop) = (Arc::new(Recorder::default()), Arc::new(AtomicBool::new(false)));
        let load = load(&nodes.shops[0], &history, sale, &buyers, &stop);
        until("the sale runs", async || history.count(Response::Created) > 20).await;
        request_and_die(nodes.shops.remove(1), sale, 95).await;
        let storage = &nodes.storages[0];
        until("the reduction is completed", async || {
            let (cap, total) = stock(storage, sale).await;
            cap == total && (5..=20).contains(&total)
        })
        .await;
        let (_, total) = stock(storage, sale).await;
        let repeated = nodes.shops[0].admin(&format!("sales/{sale}/reduce"), &reduction(95, "r")).await;
        assert_eq!((repeated.status.as_u16(), &repeated.json()["total"]), (200, &json!(total)), "{point}");
        end(load, &stop).await;
        assert_eq!(stock(storage, sale).await, (total, total));
        assert_eq!(verify(&history, storage, &[&nodes.shops[0]], sale).await, 20.min(total as usize), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reduction_is_completed_by_another_node_on_mariadb() {
    reduction_is_completed_by_another_node(Kind::MariaDb).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reduction_is_completed_by_another_node_on_postgres() {
    reduction_is_completed_by_another_node(Kind::Postgres).await;
}
