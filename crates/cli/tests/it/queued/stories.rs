//! Stories in which a simpler protocol would lose an accepted order or sell too many, on Redis Streams.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};
use stampede_core::{OrderId, Sale, SaleId, SalePhase};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, redis, until};
use tempfile::TempDir;

use super::{Consumers, outbox, queued, start};
use crate::quarantine::{accept_orders_again, execute, quarantine, reject_orders_of};
use crate::shared::{Nodes, entries};
use crate::shop::{Buyer, Kind, Shop, TOKEN, read_only};

/// A field of a sale in the gate.
fn field(nodes: &Nodes, sale: SaleId, name: &str) -> String {
    let key = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:sale")]).unwrap();
    redis::ask(nodes.redis.port(), &["hget", key.trim(), name]).unwrap().trim().to_owned()
}

fn state(nodes: &Nodes, sale: SaleId) -> String {
    field(nodes, sale, "state")
}

/// Begins a rebuild on a node, which goes on in the background.
pub(super) fn rebuild(shop: &Shop) -> tokio::task::JoinHandle<u16> {
    let address = shop.address;
    tokio::spawn(async move {
        let mut client = Client::connect(address).await.unwrap();
        let reply = client.post("/admin/v1/gate/rebuild", TOKEN, &Value::Null).await.unwrap();
        eprintln!("rebuild: {reply:?}");
        reply.status.as_u16()
    })
}

/// A sale as the ledger has it.
async fn in_ledger(nodes: &Nodes, sale: SaleId) -> Sale {
    let ledger = read_only(&nodes.storages[0]).await;
    let sale = ledger.sale(sale).await.unwrap().unwrap();
    ledger.close().await;
    sale
}

async fn total(nodes: &Nodes, sale: SaleId) -> usize {
    in_ledger(nodes, sale).await.total as usize
}

pub(super) async fn phase(nodes: &Nodes, sale: SaleId) -> SalePhase {
    in_ledger(nodes, sale).await.phase
}

/// A sale is edited while it is closed for a rebuild: the edit does not open it, and holds afterwards.
async fn an_edit_during_a_rebuild_does_not_open_the_sale(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 2, |n, command| {
        let mut command = queued(command);
        if n == 0 {
            // The first time is the start of the node.
            command.env("STAMPEDE_FAILPOINTS", "rebuild.closed=pause:2000@2");
        }
        command
    });
    let everyone = nodes.shops[0].log_in(0, 20).await;
    let sale = nodes.create_sale(10).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..8], 1).await;
    let rebuilding = rebuild(&nodes.shops[0]);
    until("the sale is closed", async || state(&nodes, sale) == "closed").await;
    let top_up = json!({ "add": 2, "request_id": "during-a-rebuild" });
    nodes.shops[1].admin(&format!("sales/{sale}/top-ups"), &top_up).await;
    assert_eq!(state(&nodes, sale), "closed", "the edit has opened the sale");
    let attempt = history.buy(&mut nodes.shops[1].client().await, sale, &everyone[9]).await;
    assert_eq!(attempt.response, Response::Unknown, "nothing is sold during a rebuild");
    assert_eq!(rebuilding.await.unwrap(), 200);
    until("the edit holds", async || total(&nodes, sale).await == 12).await;
    nodes.wait_until_open(sale).await;
    until("everything is sold", async || {
        nodes.storm(&history, sale, &everyone, 1).await;
        history.ended().iter().rev().take(40).any(|attempt| attempt.response == Response::SoldOut)
    })
    .await;
    assert_eq!(nodes.verify(&history, sale).await, 12);
}

/// Redis loses the marks, and the sale is reduced before the gate is rebuilt: the reduction takes away nothing that is sold.
async fn a_reduction_after_the_marks_are_lost_takes_nothing_that_is_sold(kind: Kind) {
    let nodes = start(kind, 1);
    let everyone = nodes.shops[0].log_in(0, 20).await;
    let sale = nodes.create_sale(12).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..10], 1).await;
    assert_eq!(history.count(Response::Pending), 10);
    let incarnation = async || nodes.shops[0].metric("stampede_gate_incarnation").await;
    let before = (incarnation().await, field(&nodes, sale, "inc"));
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap();
    // A Redis that evicts keys is not rebuilt, however soon the node notices the loss.
    ask(&["config", "set", "maxmemory-policy", "allkeys-lru"]);
    let key = ask(&["keys", &format!("stampede:*:{{{sale}}}:live")]);
    assert_eq!(ask(&["del", key.trim()]).trim(), "1");
    let reduce = json!({ "remove": 8, "request_id": "after-the-loss" });
    let reduced = nodes.shops[0].admin(&format!("sales/{sale}/reduce"), &reduce).await;
    assert_eq!((reduced.status.as_u16(), reduced.text("code").as_str()), (503, "outcome_unknown"));
    assert_eq!((incarnation().await, field(&nodes, sale, "inc")), before, "the gate is not being rebuilt");
    let in_gate = ["state", "epoch", "ver", "cap"].map(|name| field(&nodes, sale, name));
    assert_eq!(in_gate, ["on_sale", "1", "1", "12"], "the edit has written nothing");
    let reduced = in_ledger(&nodes, sale).await;
    assert_eq!((reduced.version, reduced.cap, reduced.total), (2, 4, 12), "fewer than were sold");
    ask(&["config", "set", "maxmemory-policy", "noeviction"]);
    let _consumers = Consumers::start(&nodes, 1);
    until("the gate is rebuilt", async || {
        phase(&nodes, sale).await == SalePhase::Open
            && history.buy(&mut nodes.shops[0].client().await, sale, &everyone[0]).await.response != Response::Unknown
    })
    .await;
    nodes.storm(&history, sale, &everyone, 1).await;
    let sold = nodes.verify(&history, sale).await;
    assert!(sold >= 10, "every accepted order is kept: {sold}");
    assert_eq!(sold, total(&nodes, sale).await);
}

/// A consumer that has read orders and is held before it records them.
struct HeldConsumer {
    consumers: Consumers,
    /// Exists while it is held.
    file: PathBuf,
    _directory: TempDir,
}

impl HeldConsumer {
    /// Starts a consumer that is held before it records anything.
    async fn start(nodes: &Nodes) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let armed = directory.path().join("record");
        std::fs::write(&armed, "").unwrap();
        let consumers = Consumers::start_with(nodes, 1, |mut command: Command| {
            command.env("STAMPEDE_FAILPOINTS", format!("record.begin=hold:{}", armed.display()));
            // One thread is held.
            command.env("TOKIO_WORKER_THREADS", "4");
            command
        });
        let held = Self { consumers, file: armed.with_extension("reached"), _directory: directory };
        until("the consumer is held", async || held.is_held()).await;
        held
    }

    fn is_held(&self) -> bool {
        self.file.exists()
    }

    /// The consumer records what it has read, and stops.
    fn wake_and_stop(self) {
        assert!(self.is_held());
        std::fs::remove_file(&self.file).unwrap();
        self.consumers.stop();
    }
}

/// A sale of four, of which three are sold. The order of the first buyer is in quarantine.
struct Quarantined {
    nodes: Nodes,
    everyone: Vec<Buyer>,
    sale: SaleId,
    history: Arc<Recorder>,
    order: OrderId,
    /// It has read the three orders, and records them under the old epoch when it wakes up.
    held: HeldConsumer,
}

/// The database rejects an accepted order, and the gate is rebuilt while a consumer that has read the order is held.
async fn rebuild_with_a_rejected_order(kind: Kind) -> Quarantined {
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 1, |_, command| {
        let mut command = queued(command);
        command.env("STAMPEDE__QUEUE__CONSUME", "false").env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "1000");
        command
    });
    let everyone = nodes.shops[0].log_in(0, 6).await;
    let sale = nodes.create_sale(4).await;
    // Otherwise the orders of the demonstration data would hold the consumer.
    let consumers = Consumers::start(&nodes, 1);
    until("the queue is empty", async || entries(&nodes.redis, "stampede:*:out") == 0).await;
    consumers.stop();
    let history = Arc::new(Recorder::default());
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &[everyone[0].id])).await;
    let mut client = nodes.shops[0].client().await;
    let accepted = history.buy(&mut client, sale, &everyone[0]).await;
    assert_eq!(accepted.response, Response::Pending);
    for buyer in &everyone[1..3] {
        assert_eq!(history.buy(&mut client, sale, buyer).await.response, Response::Pending);
    }
    let held = HeldConsumer::start(&nodes).await;
    let key = redis::ask(nodes.redis.port(), &["keys", &outbox(sale)]).unwrap();
    let pending = redis::ask(nodes.redis.port(), &["xpending", key.trim(), "ledger"]).unwrap();
    assert_eq!(pending.lines().next(), Some("3"), "the consumer has read the orders: {pending}");
    assert_eq!(rebuild(&nodes.shops[0]).await.unwrap(), 200);
    nodes.wait_until_open(sale).await;
    until("the order is in quarantine", async || quarantine(&nodes.shops[0]).await.len() == 1).await;
    let order = accepted.order.unwrap();
    assert_eq!(quarantine(&nodes.shops[0]).await[0]["id"], json!(order.to_string()));
    assert!(held.is_held(), "the consumer has slept through the rebuild");
    Quarantined { nodes, everyone, sale, history, order, held }
}

/// The order keeps its stock in quarantine, is recorded when it is retried, and stays dead once its user has cancelled it: when the consumer
/// wakes up that has read it, and after another rebuild.
async fn a_quarantined_order_survives_a_rebuild(kind: Kind) {
    let Quarantined { nodes, everyone, sale, history, order, held } = rebuild_with_a_rejected_order(kind).await;
    let mut client = nodes.shops[0].client().await;
    // Its stock stays taken, and its owner gets the same order.
    let again = history.buy(&mut client, sale, &everyone[0]).await;
    assert_eq!((again.response, again.order), (Response::Pending, Some(order)));
    assert_eq!(history.buy(&mut client, sale, &everyone[3]).await.response, Response::Pending, "the last one");
    assert_eq!(history.buy(&mut client, sale, &everyone[4]).await.response, Response::SoldOut);
    let _consumers = Consumers::start(&nodes, 1);
    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    let retried = nodes.shops[0].admin(&format!("quarantine/{order}/retry"), &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "recorded"));
    let mine = history.buy(&mut client, sale, &everyone[0]).await;
    assert_eq!((mine.response, mine.order), (Response::Already, Some(order)));
    assert_eq!(history.cancel(&mut client, sale, &everyone[0], order).await.response, Response::Cancelled);
    held.wake_and_stop();
    let shown = client.get(&format!("/v1/orders/{order}"), &everyone[0].token).await.unwrap();
    assert_eq!(shown.text("status"), "cancelled");
    // Another rebuild does not bring it back either, and its stock is sold to another user.
    assert_eq!(rebuild(&nodes.shops[0]).await.unwrap(), 200);
    nodes.wait_until_open(sale).await;
    until("its stock is sold", async || {
        history.buy(&mut client, sale, &everyone[4]).await.response == Response::Already
    })
    .await;
    assert_eq!(nodes.verify(&history, sale).await, 4);
}

/// Its user cancels the order while it is in quarantine. It stays dead when the consumer wakes up that has read it, and after another rebuild,
/// and its stock is sold once.
async fn a_quarantined_order_can_be_cancelled(kind: Kind) {
    let Quarantined { nodes, everyone, sale, history, order, held } = rebuild_with_a_rejected_order(kind).await;
    let mut client = nodes.shops[0].client().await;
    assert_eq!(history.cancel(&mut client, sale, &everyone[0], order).await.response, Response::Cancelled);
    assert_eq!(quarantine(&nodes.shops[0]).await, Vec::<Value>::new());
    held.wake_and_stop();
    assert_eq!(rebuild(&nodes.shops[0]).await.unwrap(), 200);
    nodes.wait_until_open(sale).await;
    let _consumers = Consumers::start(&nodes, 1);
    for buyer in &everyone[3..5] {
        assert_eq!(history.buy(&mut client, sale, buyer).await.response, Response::Pending);
    }
    assert_eq!(history.buy(&mut client, sale, &everyone[5]).await.response, Response::SoldOut);
    assert_eq!(nodes.verify(&history, sale).await, 4);
}

/// An entry of the outbox that cannot be read becomes a dead letter, which operators can see and discard. Its orders are recorded from
/// their marks.
async fn an_unreadable_entry_becomes_a_dead_letter(kind: Kind) {
    let nodes = Nodes::start_on(kind, redis::start_durable().unwrap(), 1, |_, command| {
        let mut command = queued(command);
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "500").env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "500");
        command
    });
    let buyers = nodes.shops[0].log_in(0, 4).await;
    let sale = nodes.create_sale(3).await;
    let history = Arc::new(Recorder::default());
    for buyer in &buyers[..3] {
        nodes.storm(&history, sale, std::slice::from_ref(buyer), 1).await;
    }
    assert_eq!(history.count(Response::Pending), 3);
    // The last entry is replaced by one that cannot be read.
    let key = redis::ask(nodes.redis.port(), &["keys", &format!("stampede:*:{{{sale}}}:out")]).unwrap();
    for command in [&["xdel", key.trim(), "1-3"][..], &["xsetid", key.trim(), "1-2"]] {
        redis::ask(nodes.redis.port(), command).unwrap();
    }
    let replaced = redis::ask(nodes.redis.port(), &["xadd", key.trim(), "1-3", "not", "an entry"]).unwrap();
    assert_eq!(replaced.trim(), "1-3");
    let _consumers = Consumers::start(&nodes, 1);
    let shop = &nodes.shops[0];
    let letters = async || shop.client().await.get("/admin/v1/dead-letters", TOKEN).await.unwrap().json();
    until("there is a dead letter", async || letters().await["dead_letters"].as_array().unwrap().len() == 1).await;
    let (done, text) = dead_letters_command(shop, &["list"]);
    assert!(done && text.contains("1 dead letter(s)") && text.contains("cannot be read"), "{text}");
    let id = letters().await["dead_letters"][0]["id"].as_str().unwrap().to_owned();
    let (done, text) = dead_letters_command(shop, &["show", &id]);
    assert!(done && text.contains(&id) && text.contains("content"), "{text}");
    let (done, text) = dead_letters_command(shop, &["retry", &id]);
    assert!(!done && text.contains("still cannot be read"), "{text}");
    let (done, text) = dead_letters_command(shop, &["discard", &id]);
    assert!(done && text.contains("discarded"), "{text}");
    assert!(!dead_letters_command(shop, &["discard", &id]).0, "it is gone");
    let audit = shop.client().await.get("/admin/v1/audit", TOKEN).await.unwrap();
    let audit = String::from_utf8_lossy(&audit.body).into_owned();
    assert!(audit.contains("retry_dead_letter") && audit.contains("discard_dead_letter"), "{audit}");
    nodes.storm(&history, sale, &buyers, 1).await;
    assert_eq!(history.count(Response::SoldOut), 1);
    assert_eq!(nodes.verify(&history, sale).await, 3, "the order of the entry was recorded from its mark");
}

/// Runs `stampede dead-letters` and returns whether it succeeded and what it printed.
pub fn dead_letters_command(shop: &Shop, arguments: &[&str]) -> (bool, String) {
    let target = format!("http://{}", shop.address);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.arg("dead-letters").args(arguments).args(["--target", &target]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

on_each_database!(
    @module on_postgres, Postgres,
    an_edit_during_a_rebuild_does_not_open_the_sale,
    a_reduction_after_the_marks_are_lost_takes_nothing_that_is_sold,
    a_quarantined_order_can_be_cancelled,
    an_unreadable_entry_becomes_a_dead_letter
);

on_each_database!(@module on_mariadb, MariaDb, a_quarantined_order_survives_a_rebuild);
