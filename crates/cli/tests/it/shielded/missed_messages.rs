//! Nodes that do not receive messages, for a while or for good: what they refuse by themselves is right again once they have subscribed
//! again, and otherwise after the expiry.

use std::time::{Duration, Instant};

use serde_json::json;
use stampede_core::{OrderId, SaleId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{count, redis, until};

use super::{REFUSED, node_of_redis_user, start, wait_for_listeners, wait_for_shield};
use crate::shared::Nodes;
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN};

/// The Redis user of the node whose subscription is cut.
const USER: &str = "cut";

/// How stock comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Cancel,
    TopUp,
}

/// One node that receives messages, and a further one whose subscription can be cut.
struct TwoNodes {
    nodes: Nodes,
    /// The further one.
    shop: Shop,
    _storage: Storage,
}

impl TwoNodes {
    fn start(kind: Kind, expiry_ms: u64) -> Self {
        let nodes = start(kind, 1, expiry_ms);
        let (storage, shop) = node_of_redis_user(&nodes, USER, &["+@all"], expiry_ms);
        Self { nodes, shop, _storage: storage }
    }

    fn ask(&self, command: &[&str]) -> String {
        redis::ask(self.nodes.redis.port(), command).unwrap().trim().to_owned()
    }

    /// Waits until this many nodes receive the messages about sales.
    async fn wait_for_listeners(&self, count: usize) {
        wait_for_listeners(&self.nodes.redis, count).await;
    }

    /// Ends all subscriptions. The further node may not subscribe again; the other one does.
    async fn cut(&self) {
        self.wait_for_listeners(2).await;
        self.ask(&["acl", "setuser", USER, "-subscribe"]);
        self.ask(&["client", "kill", "type", "pubsub"]);
        self.wait_for_listeners(1).await;
    }

    /// Lets the node subscribe again.
    fn reconnect(&self) {
        self.ask(&["acl", "setuser", USER, "+subscribe"]);
    }

    /// Sells the only item of a new sale, and waits until the further node refuses by itself all but its owner.
    async fn sell_out(&self, history: &Recorder, owner: &Buyer, other: &Buyer) -> SaleId {
        let sale = self.nodes.create_sale(1).await;
        self.shop.wait_for_sale(sale).await;
        let bought = history.buy(&mut self.nodes.shops[0].client().await, sale, owner).await;
        assert_eq!(bought.response, Response::Pending);
        wait_for_shield(&self.shop, history, sale, other).await;
        let owned = history.buy(&mut self.shop.client().await, sale, owner).await;
        assert!(owned.response.is_confirmation() && owned.order == bought.order, "the owner gets the order: {owned:?}");
        sale
    }

    /// Brings stock back through the other node, and waits until the gate has it.
    async fn change(&self, change: Change, history: &Recorder, sale: SaleId, owner: &Buyer) {
        let other = &self.nodes.shops[0];
        match change {
            Change::Cancel => {
                let order = history.all().iter().find_map(|attempt| attempt.order).unwrap();
                let cancelled = history.cancel(&mut other.client().await, sale, owner, order).await;
                assert_eq!(cancelled.response, Response::Cancelled);
            }
            Change::TopUp => {
                let added = json!({ "add": 1, "request_id": format!("one-more-{sale}") });
                assert_eq!(other.admin(&format!("sales/{sale}/top-ups"), &added).await.status, 200);
            }
        }
        let path = format!("/admin/v1/sales/{sale}/gate");
        until("the gate has stock", async || {
            let gate = other.client().await.get(&path, TOKEN).await.unwrap().json();
            gate["marks"].as_u64() < gate["cap"].as_u64()
        })
        .await;
    }

    /// Waits until the further node sells to this buyer. If an owner is given, they ask that node before each attempt, and get this order.
    async fn wait_until_selling(
        &self,
        history: &Recorder,
        sale: SaleId,
        buyer: &Buyer,
        owner: Option<(&Buyer, Option<OrderId>)>,
    ) {
        let mut client = self.shop.client().await;
        until("the node sells what came back", async || {
            if let Some((owner, order)) = owner {
                let owned = history.buy(&mut client, sale, owner).await;
                let is_own = owned.response.is_confirmation() && owned.order == order;
                assert!(is_own, "the owner gets the order: {owned:?} is not {order:?}");
            }
            history.buy(&mut client, sale, buyer).await.response.is_confirmation()
        })
        .await;
    }

    async fn verify(&self, history: &Recorder, sale: SaleId, change: Change) {
        let expected = if change == Change::TopUp { 2 } else { 1 };
        assert_eq!(self.nodes.verify(history, sale).await, expected, "{change:?}");
    }
}

/// Stock comes back while a node receives no messages, and its last answer of the gate is valid for long. Once it has subscribed again, it
/// sells what came back without waiting for the expiry.
async fn stock_that_came_back_unheard_is_sold_after_subscribing_again(kind: Kind) {
    let expiry = Duration::from_secs(60);
    let system = TwoNodes::start(kind, 60_000);
    let everyone = system.nodes.shops[0].log_in(0, 3).await;
    for change in [Change::Cancel, Change::TopUp] {
        let (history, started) = (Recorder::default(), Instant::now());
        let sale = system.sell_out(&history, &everyone[0], &everyone[2]).await;
        system.cut().await;
        system.change(change, &history, sale, &everyone[0]).await;
        let refused = system.shop.metric(REFUSED).await;
        let mut client = system.shop.client().await;
        assert_eq!(history.buy(&mut client, sale, &everyone[1]).await.response, Response::SoldOut);
        assert_eq!(system.shop.metric(REFUSED).await - refused, 1.0, "the node has not heard of it");
        system.reconnect();
        system.wait_until_selling(&history, sale, &everyone[1], None).await;
        // From then on the gate would have been asked again, because the answer is about to expire.
        let renewal = expiry - expiry / 5;
        assert!(started.elapsed() < renewal, "the machine is too slow for this test: {:?}", started.elapsed());
        system.verify(&history, sale, change).await;
    }
}

/// A node whose subscription ends and that may not subscribe again sells what came back within the expiry, and an owner gets the order
/// meanwhile. Its answer of the gate is from the time before the subscription ended, or from the time after.
async fn stock_that_came_back_unheard_is_sold_within_the_expiry(kind: Kind) {
    let expiry = Duration::from_secs(count(5, 3));
    let system = TwoNodes::start(kind, count(5000, 3000));
    let everyone = system.nodes.shops[0].log_in(0, 3).await;
    for (refuses_before, change) in [false, true].into_iter().flat_map(|is| [(is, Change::Cancel), (is, Change::TopUp)])
    {
        system.reconnect();
        system.wait_for_listeners(2).await;
        if !refuses_before {
            system.cut().await;
        }
        let history = Recorder::default();
        let sale = system.sell_out(&history, &everyone[0], &everyone[2]).await;
        if refuses_before {
            system.cut().await;
        }
        system.change(change, &history, sale, &everyone[0]).await;
        let has_stock_since = Instant::now();
        // A cancelled order has no owner. The gate's answer to an owner tells the node of the top-up, so in the other case only the buyer asks
        // until the expiry.
        let is_asked_by_owner = change == Change::TopUp && !refuses_before;
        let order = history.all().iter().find_map(|attempt| attempt.order);
        let owner = is_asked_by_owner.then_some((&everyone[0], order));
        system.wait_until_selling(&history, sale, &everyone[1], owner).await;
        let delay = has_stock_since.elapsed();
        eprintln!("{change:?}, refuses before: {refuses_before}: {delay:?}");
        assert!(
            delay < expiry + Duration::from_millis(1500),
            "{change:?}, refuses before: {refuses_before}: {delay:?}"
        );
        // It has not subscribed again in between.
        system.wait_for_listeners(1).await;
        system.verify(&history, sale, change).await;
    }
}

on_each_database!(servers: stock_that_came_back_unheard_is_sold_within_the_expiry);
on_each_database!(@module on_postgres, Postgres, stock_that_came_back_unheard_is_sold_after_subscribing_again);
