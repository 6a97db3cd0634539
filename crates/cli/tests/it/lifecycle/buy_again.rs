//! Sales in which a buyer whose order has ended may not buy again.

use serde_json::json;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::until;

use super::deadline::create_sale_with;
use super::{System, TierKind, in_each_tier};
use crate::shop::{Kind, Shop, verify};

/// The refusal holds on every node, after an expiry as after a cancellation, and after a restart of all nodes.
async fn nobody_buys_again_where_that_is_forbidden(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let mut system = System::start(kind, tier, nodes);
    let buyers = system.shops[0].log_in(0, 4).await;
    let members = json!({ "buy_again": false, "payment_deadline_ms": 4000 });
    let sale = create_sale_with(&system, 2, members).await;
    let history = Recorder::default();
    let bought = |response| matches!(response, Response::Created | Response::Pending);

    let (mut first, mut last) = (system.shops[0].client().await, system.shops[nodes - 1].client().await);
    for buyer in &buyers[..2] {
        assert!(bought(history.buy(&mut first, sale, buyer).await.response));
    }
    let order = history.ended()[0].order.unwrap();
    let cancelled = history.cancel(&mut first, sale, &buyers[0], order).await;
    assert_eq!(cancelled.response, Response::Cancelled);
    for client in [&mut first, &mut last] {
        assert_eq!(history.buy(client, sale, &buyers[0]).await.response, Response::BoughtBefore);
    }
    until("the stock is sold to another buyer", async || {
        bought(history.buy(&mut last, sale, &buyers[2]).await.response)
    })
    .await;
    // Nobody pays, so the orders of the others expire.
    until("the order has expired", async || {
        history.buy(&mut last, sale, &buyers[1]).await.response == Response::BoughtBefore
    })
    .await;

    for shop in system.shops.drain(..) {
        assert!(shop.stop().success());
    }
    for n in 0..nodes {
        let shop = system.run(n);
        system.shops.push(shop);
    }
    system.wait_for_sale(sale).await;
    for shop in &system.shops {
        let mut client = shop.client().await;
        for buyer in &buyers[..2] {
            assert_eq!(history.buy(&mut client, sale, buyer).await.response, Response::BoughtBefore);
        }
    }
    let mut client = system.shops[0].client().await;
    until("another buyer has what is left, in the ledger", async || {
        history.buy(&mut client, sale, &buyers[3]).await.response == Response::Already
    })
    .await;
    until("every order has expired", async || super::deadline::unpaid_left(&system, sale).await == 0).await;
    let all: Vec<&Shop> = system.shops.iter().collect();
    assert_eq!(verify(&history, &system.storages[0], &all, sale).await, 0);
}

in_each_tier!(all: nobody_buys_again_where_that_is_forbidden);
