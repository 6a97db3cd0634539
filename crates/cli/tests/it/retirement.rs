//! Sales that were over a day ago: they leave the gate, and their buyers are still answered.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use stampede_core::{Clock as _, SaleId, SystemClock};
use stampede_testkit::{Client, redis, until};

use crate::cluster::{Cluster, Servers};
use crate::quarantine::execute;
use crate::shared::entries;
use crate::shop::{Buyer, Kind, Shop, TOKEN, command, read_only, temporary_storage};

const HOUR: Duration = Duration::from_secs(3600);
/// A sale of [`Shop::create_sale`] ends after an hour, and stays in the gate for a day.
const JUMP_S: i64 = 26 * 3600;

/// Sessions outlive the jump of the clock.
fn with_long_sessions(_: usize, mut command: Command) -> Command {
    command.env("STAMPEDE__LOGIN__SESSION_TTL_MS", (7 * 24 * HOUR).as_millis().to_string());
    command
}

fn has_keys(cluster: &Cluster, sale: SaleId) -> bool {
    !cluster.ask(&["keys", &format!("stampede:*:{{{sale}}}:*")]).trim().is_empty()
}

/// Waits until a node has no gate for the sale.
async fn until_retired(shop: &Shop, sale: SaleId) {
    let path = format!("/admin/v1/sales/{sale}/gate");
    until("the sale has left the gate", async || shop.client().await.get(&path, TOKEN).await.unwrap().status == 404)
        .await;
}

/// Changes the sale in the database: it was over more than a day ago.
async fn end_long_ago(kind: Kind, cluster: &Cluster, sale: SaleId) {
    let (begin, end) = (SystemClock.now().minus(27 * HOUR), SystemClock.now().minus(25 * HOUR));
    let over = format!("UPDATE sale SET begin_at = {}, end_at = {} WHERE id = {sale}", begin.ms(), end.ms());
    execute(kind, &cluster.direct, &over).await;
}

/// The owner gets the order from the ledger, another user is refused, and the sale is shown as over.
async fn assert_answers(client: &mut Client, sale: SaleId, (owner, order): (&Buyer, &str), other: &Buyer) {
    let path = format!("/v1/sales/{sale}/orders");
    let owned = client.post(&path, &owner.token, &Value::Null).await.unwrap();
    assert_eq!((owned.status.as_u16(), owned.text("id").as_str()), (200, order), "{owned:?}");
    let refused = client.post(&path, &other.token, &Value::Null).await.unwrap();
    assert_eq!(refused.text("code"), "ended", "{refused:?}");
    let shown = client.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    assert_eq!(shown.text("state"), "ended", "{shown:?}");
}

/// Running nodes delete the keys of a sale a day after its end, and not before.
async fn a_sale_leaves_redis_a_day_after_its_end(kind: Kind) {
    let cluster = Cluster::start_with(Servers::on(kind), 2, with_long_sessions).await;
    let now = SystemClock.now();
    let sale = cluster.nodes.create_sale(2).await;
    let later = cluster.nodes.shops[0].create_sale_between(2, now, now.plus(4 * HOUR)).await;
    cluster.nodes.wait_until_open(later).await;
    let bought = cluster.ask_again(0, sale, &cluster.buyers[0]).await;
    assert_eq!(bought.status, 201, "{bought:?}");
    for part in ["sale", "live", "out"] {
        assert!(cluster.key(sale, part).is_some(), "{part}");
    }
    let rebuilds = cluster.rebuilds().await;
    (0..2).for_each(|n| cluster.set_clock(n, JUMP_S));
    until("the sale has left Redis", async || !has_keys(&cluster, sale)).await;
    for shop in &cluster.nodes.shops {
        until_retired(shop, sale).await;
        let order = bought.text("id");
        assert_answers(&mut shop.client().await, sale, (&cluster.buyers[0], &order), &cluster.buyers[1]).await;
    }
    for part in ["sale", "live", "out"] {
        assert!(cluster.key(later, part).is_some(), "{part}: it has not been over for a day");
    }
    assert_eq!(cluster.rebuilds().await, rebuilds);
    cluster.stop();
}

/// A node whose clock is ahead deletes the keys of a sale that another node still has: that is no loss, and nothing is rebuilt.
async fn a_node_whose_clock_is_ahead_may_remove_a_sale(kind: Kind) {
    let cluster = Cluster::start_with(Servers::on(kind), 2, with_long_sessions).await;
    let now = SystemClock.now();
    let sale = cluster.nodes.create_sale(2).await;
    let later = cluster.nodes.shops[0].create_sale_between(2, now, now.plus(48 * HOUR)).await;
    cluster.nodes.wait_until_open(later).await;
    let owner = &cluster.buyers[0];
    let bought = cluster.ask_again(0, sale, owner).await;
    assert_eq!(bought.status, 201, "{bought:?}");
    let rebuilds = cluster.rebuilds().await;
    // The sale has been over for a day in 30 seconds.
    cluster.set_clock(1, 25 * 3600 - 30);
    cluster.set_clock(0, JUMP_S);
    until("the sale has left Redis", async || !has_keys(&cluster, sale)).await;
    let behind = &cluster.nodes.shops[1];
    let path = format!("/v1/sales/{sale}/orders");
    let asked = behind.client().await.post(&path, &owner.token, &Value::Null).await.unwrap();
    assert_eq!(asked.status, 503, "it finds no keys: {asked:?}");
    // This is read by the rounds that look for losses.
    execute(kind, &cluster.direct, &format!("UPDATE sale SET status = 'paused', ver = ver + 1 WHERE id = {later}"))
        .await;
    until("the node has looked for losses", async || {
        behind.client().await.get(&format!("/v1/sales/{later}"), "").await.unwrap().text("state") == "paused"
    })
    .await;
    assert_eq!(cluster.rebuilds().await, rebuilds);
    cluster.set_clock(1, JUMP_S);
    until_retired(behind, sale).await;
    let mut client = behind.client().await;
    assert_answers(&mut client, sale, (owner, &bought.text("id")), &cluster.buyers[1]).await;
    assert_eq!(cluster.rebuilds().await, rebuilds);
    drop(client);
    cluster.stop();
}

/// Another program has written to a key of a sale that is to be removed: the nodes are ready and sell other sales, and the next start deletes
/// the keys.
async fn a_damaged_sale_that_is_over_holds_up_no_other(kind: Kind) {
    let mut cluster = Cluster::start_with(Servers::on(kind), 2, with_long_sessions).await;
    let now = SystemClock.now();
    let sale = cluster.nodes.create_sale(2).await;
    let later = cluster.nodes.shops[0].create_sale_between(5, now, now.plus(4 * HOUR)).await;
    cluster.nodes.wait_until_open(later).await;
    let bought = cluster.ask_again(0, sale, &cluster.buyers[0]).await;
    assert_eq!(bought.status, 201, "{bought:?}");
    // Over, but not for a day: the nodes look at it only every ten seconds.
    (0..2).for_each(|n| cluster.set_clock(n, 3 * 3600));
    for shop in &cluster.nodes.shops {
        until("the sale is over", async || {
            shop.client().await.get(&format!("/v1/sales/{sale}"), "").await.unwrap().text("state") == "ended"
        })
        .await;
    }
    let key = cluster.key(sale, "out").unwrap();
    cluster.ask(&["set", &key, "x"]);
    (0..2).for_each(|n| cluster.set_clock(n, JUMP_S));
    for (shop, buyer) in cluster.nodes.shops.iter().zip(&cluster.buyers) {
        until_retired(shop, sale).await;
        until("the node is ready", async || shop.client().await.get("/readyz", "").await.unwrap().status == 200).await;
        let order = bought.text("id");
        assert_answers(&mut shop.client().await, sale, (&cluster.buyers[0], &order), &cluster.buyers[1]).await;
        let path = format!("/v1/sales/{later}/orders");
        assert_eq!(shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap().status, 201);
    }
    // Also by the clock of the database.
    (0..2).for_each(|n| cluster.set_clock(n, 0));
    end_long_ago(kind, &cluster, sale).await;
    cluster.restart(0);
    until("the sale has left Redis", async || !has_keys(&cluster, sale)).await;
    cluster.stop();
}

/// No node runs when a sale has been over for a day. The next start records what is left in its outbox, and deletes its keys; also if it
/// rebuilds the gate, because Redis was restarted as well.
async fn a_sale_that_ends_while_no_node_runs_leaves_redis(kind: Kind) {
    let servers = Servers { redis: redis::start_durable().unwrap(), ..Servers::on(kind) };
    let mut cluster = Cluster::start_with(servers, 1, with_long_sessions).await;
    for restarts_redis in [false, true] {
        let (sale, on) = (cluster.nodes.create_sale(5).await, cluster.nodes.create_sale(5).await);
        let [owner, left, other] = [0, 1, 2].map(|n: usize| cluster.buyers[n].clone());
        let bought = cluster.ask_again(0, sale, &owner).await;
        assert_eq!(bought.status, 201, "{bought:?}");
        // The buyer was answered before the entry of the order was settled.
        let left_in_outbox = |cluster: &Cluster| entries(&cluster.nodes.redis, &format!("stampede:*:{{{sale}}}:out"));
        until("the order is settled", async || left_in_outbox(&cluster) == 0).await;
        cluster.restart_with_failpoint(0, "buy.admitted=abort");
        cluster.nodes.wait_until_open(sale).await;
        let path = format!("/v1/sales/{sale}/orders");
        let unanswered = cluster.nodes.shops[0].client().await.post(&path, &left.token, &Value::Null).await;
        assert!(unanswered.is_err(), "the node died after the admission: {unanswered:?}");
        cluster.wait_for_death(0);
        assert_eq!(left_in_outbox(&cluster), 1);

        end_long_ago(kind, &cluster, sale).await;
        if restarts_redis {
            cluster.nodes.redis.kill().unwrap();
            cluster.nodes.redis.restart().unwrap();
        }
        assert!(has_keys(&cluster, sale));
        cluster.restart(0);
        until("the sale has left Redis", async || !has_keys(&cluster, sale)).await;
        let shop = &cluster.nodes.shops[0];
        assert_eq!(shop.metric("stampede_gate_rebuilds_total").await, f64::from(u8::from(restarts_redis)));
        assert_answers(&mut shop.client().await, sale, (&owner, &bought.text("id")), &other).await;
        let recorded = cluster.ask_again(0, sale, &left).await;
        assert_eq!(recorded.status, 200, "the order that was left is recorded: {recorded:?}");
        let ledger = read_only(&cluster.direct).await;
        let records = ledger.inspect(sale).await.unwrap().unwrap();
        ledger.close().await;
        let live = records.orders.iter().filter(|row| row.live).count();
        assert_eq!((live, records.sale.sold), (2, 2), "{:?}", records.orders);

        assert!(has_keys(&cluster, on));
        cluster.nodes.wait_until_open(on).await;
        assert_eq!(cluster.ask_again(0, on, &other).await.status, 201, "the other sale is on");
    }
    cluster.stop();
}

/// The same without Redis: the gate in memory forgets the sale.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sale_leaves_the_gate_in_memory_a_day_after_its_end() {
    let storage = temporary_storage();
    let clock = storage.path().join("clock");
    std::fs::write(&clock, "0").unwrap();
    let mut command = with_long_sessions(0, command(&storage));
    command.env("STAMPEDE_CLOCK_FILE", &clock);
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, 2).await;
    let sale = shop.create_sale(2).await;
    let mut client = shop.client().await;
    let path = format!("/v1/sales/{sale}/orders");
    let bought = client.post(&path, &buyers[0].token, &Value::Null).await.unwrap();
    assert_eq!(bought.status, 201, "{bought:?}");
    std::fs::write(&clock, (JUMP_S * 1000).to_string()).unwrap();
    until_retired(&shop, sale).await;
    assert_answers(&mut client, sale, (&buyers[0], &bought.text("id")), &buyers[1]).await;
    drop(client);
    assert!(shop.stop().success());
}

on_each_database!(
    servers: a_sale_leaves_redis_a_day_after_its_end,
    a_node_whose_clock_is_ahead_may_remove_a_sale,
    a_damaged_sale_that_is_over_holds_up_no_other,
    a_sale_that_ends_while_no_node_runs_leaves_redis
);
