//! A node dies after it has created a sale.

use std::time::Duration;

use serde_json::json;
use stampede_core::{Clock as _, Epoch, SaleId, SalePhase, SystemClock};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use crate::shared::{Nodes, without_demo};
use crate::shop::{Kind, Shop, Storage, TOKEN, read_only};

use super::foreign_lock::ForeignLock;
use super::rebuilds::is_alerted;
use super::{CRASHES, seeds};

/// A further node creates a sale and dies before it opens it.
async fn create_and_die(nodes: &Nodes) -> SaleId {
    let storage = Storage::with(Some(nodes.storages[0].url()));
    // The demonstration data has sales, too, at whose creation the node would die.
    let mut command = without_demo(&nodes.node(&storage));
    command.env("STAMPEDE_FAILPOINTS", "sale.created=abort");
    let mut dying = Shop::run(command);
    let (voucher, now) = (dying.create_voucher().await, SystemClock.now());
    let end = now.plus(Duration::from_secs(3600));
    let sale = json!({ "voucher_id": voucher, "stock": 5, "begin": now, "end": end });
    assert!(dying.client().await.post("/admin/v1/sales", TOKEN, &sale).await.is_err(), "the node is dead");
    assert!(!dying.process.wait(Duration::from_secs(10)).unwrap().success());
    let ledger = read_only(&nodes.storages[0]).await;
    let sales = ledger.sales(None).await.unwrap();
    let sale = sales.into_iter().find(|sale| sale.voucher.to_string() == voucher).unwrap();
    assert_eq!((sale.phase, sale.epoch), (SalePhase::Loading, Epoch(1)), "not opened yet");
    ledger.close().await;
    sale.id
}

/// The sale is committed, and it is not open in the gate. One of the other nodes opens it some seconds later, without a rebuild of the other
/// sales, and all of them sell it.
async fn a_node_dies_after_it_has_created_a_sale(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let mut created = Vec::new();
    for _ in seeds(CRASHES / 2) {
        created.push(create_and_die(&nodes).await);
    }
    let rebuilds = async || {
        let mut sum = 0.0;
        for shop in &nodes.shops {
            sum += shop.metric("stampede_gate_rebuilds_total").await;
        }
        sum
    };
    let before = rebuilds().await;
    for sale in created {
        nodes.wait_until_open(sale).await;
        let history = Recorder::default();
        for (n, buyer) in buyers.iter().enumerate() {
            let shop = &nodes.shops[n % nodes.shops.len()];
            until("the sale is sold", async || {
                history.buy(&mut shop.client().await, sale, buyer).await.response.is_confirmation()
            })
            .await;
        }
        assert_eq!(nodes.verify(&history, sale).await, buyers.len());
    }
    assert_eq!(rebuilds().await, before, "only the new sales are opened");
}

/// The gate was rebuilt while another client of the database has locked a sale, which a node goes on to try for minutes. A sale that is created
/// meanwhile by a node that dies is opened as soon as usual.
async fn a_locked_sale_keeps_no_created_one_closed(kind: Kind) {
    let nodes = Nodes::start(kind, 2);
    let buyer = nodes.shops[0].log_in(0, 1).await.remove(0);
    let locked = nodes.create_sale(5).await;
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &[locked]).await;
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    until("an alert names the sale", async || is_alerted(&nodes, "sale_not_rebuilt").await).await;
    let created = create_and_die(&nodes).await;
    nodes.wait_until_open(created).await;
    lock.release().await;
    for sale in [created, locked] {
        let history = Recorder::default();
        for shop in &nodes.shops {
            until("the sale is sold", async || {
                history.buy(&mut shop.client().await, sale, &buyer).await.response.is_confirmation()
            })
            .await;
        }
        assert_eq!(nodes.verify(&history, sale).await, 1);
    }
}

on_each_database!(servers: a_node_dies_after_it_has_created_a_sale, a_locked_sale_keeps_no_created_one_closed);
