//! Another client of the database has locked a sale whose reduction is to be completed: it holds up no other sale.

use std::path::Path;
use std::process::Command;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{redis, until};

use super::{dying_at, request_and_die, stock};
use crate::quarantine::execute;
use crate::recovery::foreign_lock::ForeignLock;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage, command, verify};

/// The process is held when it completes a reduction: while there is a file `reached`, after which the sale can be locked.
fn holding_at_the_gate(armed: &Path, mut command: Command) -> Command {
    std::fs::write(armed, "").unwrap();
    // One thread is held.
    command.env("TOKIO_WORKER_THREADS", "4");
    command.env("STAMPEDE_FAILPOINTS", format!("reduce.gate=hold:{}", armed.display()));
    command
}

/// Another client of the database locks the row of a sale whose reduction a node completes, and the gate is rebuilt: the other sale is sold
/// meanwhile.
async fn a_locked_reduction_holds_up_no_other_sale(kind: Kind) {
    let directory = tempfile::tempdir().unwrap();
    let (armed, reached) = (directory.path().join("reduction"), directory.path().join("reduction.reached"));
    let mut nodes = Nodes::start_with(kind, 2, |n, command| match n {
        0 => holding_at_the_gate(&armed, command),
        _ => dying_at("reduce.ledger", command),
    });
    let (buyer, history) = (nodes.shops[0].log_in(0, 1).await.remove(0), Recorder::default());
    let (reduced, other) = (nodes.create_sale(10).await, nodes.create_sale(5).await);
    request_and_die(nodes.shops.remove(1), reduced, 4).await;
    until("the reduction is about to be completed", async || reached.exists()).await;
    let lock = ForeignLock::on_sales(kind, &nodes.storages[0], &[reduced]).await;
    std::fs::remove_file(&reached).unwrap();
    redis::ask(nodes.redis.port(), &["script", "flush"]).unwrap();
    until("the other sale is sold", async || {
        let bought = history.buy(&mut nodes.shops[0].client().await, other, &buyer).await;
        matches!(bought.response, Response::Created | Response::Already)
    })
    .await;
    assert_eq!(stock(&nodes.storages[0], reduced).await, (6, 10), "the lock is still held");
    lock.release().await;
    until("the reduction is completed", async || stock(&nodes.storages[0], reduced).await == (6, 6)).await;
    assert_eq!(nodes.verify(&history, other).await, 1);
    assert_eq!(nodes.verify(&Recorder::default(), reduced).await, 0);
}

/// The same in the tier `solo`: an edit of another sale by another process is followed meanwhile.
async fn a_locked_reduction_holds_up_no_edit_of_another_sale(kind: Kind) {
    let directory = tempfile::tempdir().unwrap();
    let (armed, reached) = (directory.path().join("reduction"), directory.path().join("reduction.reached"));
    let server = kind.server().unwrap();
    let url = kind.create_database(server, server.port());
    let storages = [Storage::with(Some(url.clone())), Storage::with(Some(url))];
    let shop = Shop::run(holding_at_the_gate(&armed, command(&storages[0])));
    let dying = Shop::run(dying_at("reduce.ledger", command(&storages[1])));
    let (reduced, other) = (shop.create_sale(10).await, shop.create_sale(5).await);
    dying.wait_for_sale(reduced).await;
    request_and_die(dying, reduced, 4).await;
    until("the reduction is about to be completed", async || reached.exists()).await;
    let lock = ForeignLock::on_sales(kind, &storages[0], &[reduced]).await;
    std::fs::remove_file(&reached).unwrap();
    let pause = format!("UPDATE sale SET status = 'paused', ver = ver + 1 WHERE id = {other}");
    execute(kind, &storages[0], &pause).await;
    until("the other sale is paused", async || {
        shop.client().await.get(&format!("/v1/sales/{other}"), "").await.unwrap().text("state") == "paused"
    })
    .await;
    assert_eq!(stock(&storages[0], reduced).await, (6, 10), "the lock is still held");
    lock.release().await;
    until("the reduction is completed", async || stock(&storages[0], reduced).await == (6, 6)).await;
    for sale in [reduced, other] {
        assert_eq!(verify(&Recorder::default(), &storages[0], &[&shop], sale).await, 0);
    }
    assert!(shop.stop().success());
}

on_each_database!(
    servers: a_locked_reduction_holds_up_no_other_sale, a_locked_reduction_holds_up_no_edit_of_another_sale
);
