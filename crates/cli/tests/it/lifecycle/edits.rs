//! Operators change when a running sale begins and ends, and pause and resume it: each edit holds on every node, once per request id.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::{Clock as _, SaleId, SystemClock, Timestamp};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Reply, until};

use super::{System, TierKind, in_each_tier};
use crate::shop::{Buyer, Kind, Shop, TOKEN, read_only, verify};

const SECOND: Duration = Duration::from_secs(1);
/// How long after an edit was answered a node may still answer as before.
const VISIBLE_WITHIN: Duration = SECOND;
const HOUR: Duration = Duration::from_secs(3600);

/// Running nodes with a sale, its buyers, and the history of what they got.
struct Scene {
    system: System,
    buyers: Vec<Buyer>,
    history: Recorder,
    sale: SaleId,
    begin: Timestamp,
    end: Timestamp,
}

/// The buyer who gets no order.
const STRANGER: usize = 7;

impl Scene {
    /// A sale that begins after this time, and goes on for that long.
    async fn start(kind: Kind, tier: TierKind, begins_in: Duration, length: Duration) -> Self {
        Self::start_with(kind, tier, Vec::new(), begins_in, length).await
    }

    /// The same, with environment variables of the nodes.
    async fn start_with(
        kind: Kind,
        tier: TierKind,
        environment: Vec<(&'static str, String)>,
        begins_in: Duration,
        length: Duration,
    ) -> Self {
        let nodes = if kind == Kind::Sqlite { 1 } else { 2 };
        let system = System::start_with(kind, tier, nodes, environment);
        let buyers = system.shops[0].log_in(0, 8).await;
        let begin = SystemClock.now().plus(begins_in);
        let end = begin.plus(length);
        let sale = system.shops[0].create_sale_between(100, begin, end).await;
        system.wait_for_sale(sale).await;
        Self { system, buyers, history: Recorder::default(), sale, begin, end }
    }

    async fn edit(&self, node: usize, what: &str, body: &Value) -> Reply {
        self.system.shops[node].admin(&format!("sales/{}/{what}", self.sale), body).await
    }

    async fn edit_window(&self, node: usize, body: &Value) -> Value {
        let edited = self.edit(node, "window", body).await;
        assert_eq!(edited.status, 200, "{edited:?}");
        edited.json()
    }

    /// Tops up or reduces. Returns the total and the version in the answer.
    async fn change_stock(&self, node: usize, what: &str, body: &Value) -> (Value, Value) {
        let changed = self.edit(node, what, body).await;
        assert_eq!(changed.status, 200, "{changed:?}");
        let sale = changed.json();
        (sale["total"].clone(), sale["ver"].clone())
    }

    async fn buy(&self, node: usize, buyer: usize) -> Response {
        let mut client = self.system.shops[node].client().await;
        self.history.buy(&mut client, self.sale, &self.buyers[buyer]).await.response
    }

    /// A buyer on each node tries until they have an order. No attempt may be refused that begins when edits are visible.
    async fn all_can_buy(&self, since: Instant) {
        self.all_sell(since, 0).await;
    }

    /// The same with other buyers: this one, and those after them.
    async fn all_sell(&self, since: Instant, first: usize) {
        for node in 0..self.system.shops.len() {
            until("the node sells", async || {
                let started = Instant::now();
                let response = self.buy(node, first + node).await;
                let is_bought = matches!(response, Response::Created | Response::Pending | Response::Already);
                let is_in_time = started < since + VISIBLE_WITHIN;
                assert!(is_bought || is_in_time, "node {node} refuses with {response:?}");
                is_bought
            })
            .await;
        }
    }

    /// Every node refuses a buyer without an order for this reason, at the latest in attempts that begin when edits are visible.
    async fn all_refuse(&self, since: Instant, refusal: Response) {
        let stranger = &self.buyers[STRANGER];
        for (node, shop) in self.system.shops.iter().enumerate() {
            let mut client = shop.client().await;
            until("the node refuses", async || {
                let started = Instant::now();
                let attempt = self.history.buy(&mut client, self.sale, stranger).await;
                if let Some(order) = attempt.order.filter(|_| attempt.response.is_confirmation()) {
                    self.history.cancel(&mut client, self.sale, stranger, order).await;
                }
                let is_in_time = started < since + VISIBLE_WITHIN;
                assert!(attempt.response == refusal || is_in_time, "node {node} answers with {:?}", attempt.response);
                attempt.response == refusal
            })
            .await;
        }
    }

    /// Every node shows this member of the sale to visitors.
    async fn all_show(&self, since: Instant, member: &str, expected: &Value) {
        for shop in &self.system.shops {
            let mut client = shop.client().await;
            let path = format!("/v1/sales/{}", self.sale);
            until("the edit is shown", async || {
                let started = Instant::now();
                let shown = client.get(&path, "").await.unwrap().json()[member].clone();
                assert!(shown == *expected || started < since + VISIBLE_WITHIN, "{member} is {shown}");
                shown == *expected
            })
            .await;
        }
    }

    /// The invariants hold, and the gate is known to have every edit. Returns the number of live orders.
    async fn verify(&self) -> usize {
        let nodes: Vec<&Shop> = self.system.shops.iter().collect();
        let live = verify(&self.history, &self.system.storages[0], &nodes, self.sale).await;
        let ledger = read_only(&self.system.storages[0]).await;
        let edits = ledger.inspect(self.sale).await.unwrap().unwrap().edits;
        ledger.close().await;
        assert!(edits.iter().all(|edit| edit.applied_at.is_some_and(|at| at >= edit.asked_at)), "{edits:?}");
        live
    }
}

async fn wait_for_time(at: Timestamp) {
    until("the time has come", async || SystemClock.now() >= at).await;
}

async fn begin_is_moved_on_every_node(kind: Kind, tier: TierKind) {
    let scene = Scene::start(kind, tier, HOUR, HOUR).await;
    for node in 0..scene.system.shops.len() {
        // A node of `shielded` refuses by itself after the first attempts.
        for _ in 0..5 {
            assert_eq!(scene.buy(node, STRANGER).await, Response::NotStarted);
        }
    }
    let moved = SystemClock.now();
    let body = json!({ "begin": moved, "request_id": "earlier" });
    let edited = scene.edit_window(0, &body).await;
    let since = Instant::now();
    assert_eq!((&edited["begin"], &edited["state"], &edited["ver"]), (&json!(moved), &json!("on"), &json!(2)));
    scene.all_can_buy(since).await;
    scene.all_show(since, "begin", &json!(moved)).await;
    // It has begun, so that its begin stays. The same request again changes nothing.
    let later = json!({ "begin": scene.begin, "request_id": "later" });
    let refused = scene.edit(scene.system.shops.len() - 1, "window", &later).await;
    assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (409, "illegal_step"));
    assert!(refused.text("detail").contains("has begun"), "{refused:?}");
    assert_eq!(scene.edit_window(0, &body).await["ver"], 2);
    scene.verify().await;
}

async fn extended_sale_goes_on_after_its_old_end(kind: Kind, tier: TierKind) {
    let scene = Scene::start(kind, tier, Duration::ZERO, 6 * SECOND).await;
    let new_end = scene.begin.plus(HOUR);
    scene.edit_window(0, &json!({ "end": new_end, "request_id": "extend" })).await;
    let since = Instant::now();
    assert!(SystemClock.now() < scene.end, "the machine is too slow for this test");
    scene.all_show(since, "end", &json!(new_end)).await;
    wait_for_time(scene.end).await;
    scene.all_can_buy(since).await;
    scene.verify().await;
}

async fn shortened_sale_ends_at_its_new_end(kind: Kind, tier: TierKind) {
    let scene = Scene::start(kind, tier, Duration::ZERO, HOUR).await;
    let last = scene.system.shops.len() - 1;
    scene.all_can_buy(Instant::now()).await;
    let new_end = SystemClock.now().plus(4 * SECOND);
    let body = json!({ "end": new_end, "request_id": "shorten" });
    scene.edit_window(last, &body).await;
    scene.all_show(Instant::now(), "end", &json!(new_end)).await;
    wait_for_time(new_end).await;
    scene.all_refuse(Instant::now(), Response::Ended).await;
    // An owner still gets their order.
    assert_eq!(scene.buy(last, last).await, Response::Already);
    // The retry of the request that has ended the sale changes nothing; there is no way back.
    assert_eq!(scene.edit_window(0, &body).await["state"], "ended");
    let again = json!({ "end": new_end.plus(HOUR), "request_id": "again" });
    let refused = scene.edit(0, "window", &again).await;
    assert_eq!((refused.text("code"), refused.text("detail")), ("illegal_step".into(), "the sale has ended".into()));
    scene.verify().await;
}

async fn late_retry_of_a_pause_changes_nothing(kind: Kind, tier: TierKind) {
    let scene = Scene::start(kind, tier, Duration::ZERO, HOUR).await;
    let last = scene.system.shops.len() - 1;
    let request = |id: &str| json!({ "request_id": id });
    let edit = async |node, what: &str, id: &str| {
        let edited = scene.edit(node, what, &request(id)).await;
        assert_eq!(edited.status, 200, "{edited:?}");
        (edited.text("status"), edited.json()["ver"].as_u64().unwrap())
    };
    assert_eq!(edit(0, "pause", "pause-1").await, ("paused".into(), 2));
    scene.all_refuse(Instant::now(), Response::Paused).await;
    assert_eq!(edit(last, "resume", "resume-1").await, ("on_sale".into(), 3));
    let since = Instant::now();
    for node in [0, last] {
        assert_eq!(edit(node, "pause", "pause-1").await, ("on_sale".into(), 3), "a late retry");
    }
    scene.all_can_buy(since).await;
    for (what, body) in [
        ("end", request("pause-1")),
        ("top-ups", json!({ "add": 1, "request_id": "pause-1" })),
        ("reduce", json!({ "remove": 1, "request_id": "pause-1" })),
        ("window", json!({ "end": scene.end.plus(HOUR), "request_id": "pause-1" })),
    ] {
        assert_eq!(scene.edit(0, what, &body).await.text("code"), "request_id_reused", "{what}");
    }
    for bad in [json!({ "request_id": "" }), json!({ "request_id": "a b" }), json!({ "id": "a" })] {
        assert_eq!(scene.edit(0, "pause", &bad).await.text("code"), "invalid_request", "{bad}");
    }
    // Without a request id the sale is paused each time.
    assert_eq!(scene.edit(last, "pause", &Value::Null).await.text("status"), "paused");
    assert_eq!(edit(0, "end", "end-1").await, ("ended".into(), 5));
    assert_eq!(edit(last, "pause", "pause-1").await, ("ended".into(), 5));
    scene.all_refuse(Instant::now(), Response::Ended).await;
    scene.verify().await;
}

/// Each change holds on every node and is made once, and a reduction leaves what is sold.
async fn stock_is_changed_on_every_node(kind: Kind, tier: TierKind) {
    let scene = Scene::start(kind, tier, Duration::ZERO, HOUR).await;
    let nodes = scene.system.shops.len();
    let last = nodes - 1;
    scene.all_can_buy(Instant::now()).await;
    let reduction = json!({ "remove": 100 - nodes, "request_id": "reduce" });
    let reduced = scene.change_stock(0, "reduce", &reduction).await;
    let since = Instant::now();
    assert_eq!(reduced.0, json!(nodes));
    scene.all_refuse(since, Response::SoldOut).await;
    scene.all_show(since, "total", &json!(nodes)).await;
    assert_eq!(scene.change_stock(last, "reduce", &reduction).await, reduced, "a repeated reduction");

    let addition = json!({ "add": 3, "request_id": "add" });
    let added = scene.change_stock(last, "top-ups", &addition).await;
    let since = Instant::now();
    assert_eq!(added.0, json!(nodes + 3));
    scene.all_sell(since, nodes).await;
    scene.all_show(since, "total", &json!(nodes + 3)).await;
    assert_eq!(scene.change_stock(0, "top-ups", &addition).await, added, "a repeated top-up");

    // Two buyers on each node have an order.
    let sold = 2 * nodes;
    let reduction = json!({ "remove": nodes + 3 - sold + 1, "request_id": "too-much" });
    let reduced = scene.change_stock(0, "reduce", &reduction).await;
    let since = Instant::now();
    assert_eq!(reduced.0, json!(sold), "what is sold stays");
    scene.all_refuse(since, Response::SoldOut).await;
    scene.all_show(since, "total", &json!(sold)).await;
    assert_eq!(
        scene.change_stock(last, "reduce", &reduction).await,
        reduced,
        "a repeated reduction below what is sold"
    );
    assert_eq!(scene.verify().await, sold);
}

/// The node dies when the ledger has the edit and the gate does not, or when the gate has it and the ledger does not know that.
async fn window_is_changed_although_a_node_dies(kind: Kind, tier: TierKind) {
    for failpoint in ["sale.edited", "edit.gate"] {
        let environment = vec![("STAMPEDE_FAILPOINTS", format!("{failpoint}=abort"))];
        let mut scene = Scene::start_with(kind, tier, environment, HOUR, HOUR).await;
        assert_eq!(scene.buy(0, STRANGER).await, Response::NotStarted);
        let path = format!("/admin/v1/sales/{}/window", scene.sale);
        let body = json!({ "begin": SystemClock.now(), "request_id": "earlier" });
        let mut client = Client::connect(scene.system.shops[0].address).await.unwrap();
        client.post(&path, TOKEN, &body).await.expect_err("the node dies");
        assert!(!scene.system.shops[0].process.wait(10 * SECOND).unwrap().success());
        // Another node, or the next start, brings the edit into the gate and notes it.
        scene.system.shops[0] = scene.system.run(0);
        scene.system.wait_for_sale(scene.sale).await;
        let ledger = read_only(&scene.system.storages[0]).await;
        let is_pending = async || !ledger.sales_with_pending_edits(10).await.unwrap().is_empty();
        until("the edit is in the gate", async || !is_pending().await).await;
        ledger.close().await;
        scene.all_can_buy(Instant::now()).await;
        scene.verify().await;
    }
}

in_each_tier!(
    all:
    begin_is_moved_on_every_node,
    extended_sale_goes_on_after_its_old_end,
    shortened_sale_ends_at_its_new_end,
    late_retry_of_a_pause_changes_nothing,
    stock_is_changed_on_every_node,
    window_is_changed_although_a_node_dies
);
