//! A client is cut off after it has sent its request.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy};

use crate::cluster::Cluster;
use crate::shop::{Kind, Shop, verify};

use super::{CRASHES, seeds};

/// The response is lost, or the connection is closed at a random moment. Asking again gives the same order, on any node, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_cut_off_and_asks_again() {
    let cluster = Cluster::start(Kind::MariaDb, 2).await;
    let to_node = Proxy::start(cluster.nodes.shops[0].address).await.unwrap();
    for seed in seeds(CRASHES) {
        let mut rng = StdRng::seed_from_u64(seed);
        let (sale, history) = (cluster.nodes.create_sale(100).await, Recorder::default());
        let mut confirmed = 0;
        for (n, buyer) in cluster.buyers.iter().enumerate() {
            let mut client = Client::connect(to_node.address()).await.unwrap();
            let is_lost = n % 2 == 0;
            to_node.set(if is_lost { Fault::DropResponses } else { Fault::None });
            let pause = Duration::from_micros(rng.random_range(0..30_000));
            let (attempt, ()) = tokio::join!(history.buy(&mut client, sale, buyer), async {
                if is_lost {
                    // The order is recorded whether or not the client hears of it.
                    let gate = format!("/admin/v1/sales/{sale}/gate");
                    stampede_testkit::until("the order is recorded", async || {
                        let gate = cluster.nodes.shops[0].client().await.get(&gate, crate::shop::TOKEN).await.unwrap();
                        gate.json()["marks"] == n + 1
                    })
                    .await;
                } else {
                    tokio::time::sleep(pause).await;
                }
                to_node.cut_all();
            });
            assert!(!is_lost || attempt.response == Response::Unknown);
            let mut orders: Vec<_> = attempt.order.into_iter().collect();
            for shop in &cluster.nodes.shops {
                let again = history.buy(&mut shop.client().await, sale, buyer).await;
                assert!(again.response.is_confirmation(), "{again:?}");
                assert!(!is_lost || again.response == Response::Already, "{again:?}");
                orders.extend(again.order);
            }
            orders.dedup();
            assert_eq!(orders.len(), 1, "the same order");
            confirmed += 1;
        }
        to_node.set(Fault::None);
        let shops: Vec<&Shop> = cluster.nodes.shops.iter().collect();
        assert_eq!(verify(&history, &cluster.direct, &shops, sale).await, confirmed);
    }
    cluster.stop();
}
