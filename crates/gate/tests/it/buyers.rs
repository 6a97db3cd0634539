//! Reading who has a mark, in pages.

use std::collections::BTreeSet;

use stampede_core::ports::gate::Release;
use stampede_core::ports::{Gate as _, LoadedSale};
use stampede_core::{OrderId, SaleStatus, UserId};
use stampede_gate::RedisGate;
use stampede_testkit::Server;
use stampede_testkit::redis as server;

use crate::conformance::{id, sale};
use crate::redis_gate;

/// More than fit into one page.
const BUYERS: i64 = 5000;

fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

fn order(n: i64) -> OrderId {
    OrderId::new(1_000_000 + n).unwrap()
}

/// A gate with a mark for each buyer.
async fn sold_out() -> (Server, RedisGate) {
    let server = server::start().unwrap();
    let gate = redis_gate(server.port(), "a", 1);
    gate.load_scripts(1).await.unwrap();
    let marks = (1..=BUYERS).map(|n| (user(n), order(n))).collect();
    let cap = u32::try_from(BUYERS).unwrap();
    gate.open(LoadedSale { sale: sale(cap, 1, SaleStatus::OnSale), marks, ended: Vec::new() }).await.unwrap();
    (server, gate)
}

/// Reads all pages, with something in between. Returns the users and the number of pages.
async fn read(gate: &RedisGate, mut between: impl AsyncFnMut(u32)) -> (BTreeSet<UserId>, u32) {
    let (mut users, mut pages, mut cursor) = (BTreeSet::new(), 0, 0);
    loop {
        let (next, page) = gate.buyers(id(), cursor).await.unwrap();
        users.extend(page);
        pages += 1;
        if next == 0 {
            return (users, pages);
        }
        between(pages).await;
        cursor = next;
    }
}

#[tokio::test]
async fn all_buyers_are_read_in_several_pages() {
    let (_server, gate) = sold_out().await;
    let (users, pages) = read(&gate, async |_| {}).await;
    assert!(pages > 1, "{pages} pages");
    assert_eq!(users, (1..=BUYERS).map(user).collect::<BTreeSet<_>>());
}

/// One command for all of them would take longer than Redis is waited for, and hold up others.
#[tokio::test]
async fn marks_are_read_in_several_pages() {
    let (server, gate) = sold_out().await;
    let (epoch, marks) = gate.surviving_marks(id()).await.unwrap().unwrap();
    assert_eq!(epoch, stampede_core::Epoch(1));
    assert_eq!(marks, (1..=BUYERS).map(|n| (user(n), order(n))).collect::<Vec<_>>());
    let commands = server::ask(server.port(), &["info", "commandstats"]).unwrap();
    assert!(commands.contains("cmdstat_hscan") && !commands.contains("cmdstat_hgetall"), "{commands}");
    server::ask(server.port(), &["hdel", "stampede:a:{1}:live", "#epoch"]).unwrap();
    assert_eq!(gate.surviving_marks(id()).await.unwrap(), None);
}

/// Marks are released between the pages, which makes Redis shrink the table. Buyers who have a mark all the time are read.
#[tokio::test]
async fn buyers_with_a_mark_are_read_while_others_are_released() {
    let (_server, gate) = sold_out().await;
    let kept = BUYERS / 10;
    let release = async |page: u32| {
        if page == 1 {
            let releases: Vec<_> = (kept + 1..=BUYERS)
                .map(|n| Release { user: user(n), order: order(n), existing: None, ended: false })
                .collect();
            for some in releases.chunks(500) {
                assert!(gate.release(id(), some).await.unwrap().into_iter().all(|released| released));
            }
        }
    };
    let (users, pages) = read(&gate, release).await;
    assert!(pages > 1, "{pages} pages");
    let lost = (1..=kept).filter(|n| !users.contains(&user(*n))).count();
    assert_eq!(lost, 0, "of {kept} buyers");
    let left = read(&gate, async |_| {}).await.0;
    assert_eq!(left, (1..=kept).map(user).collect::<BTreeSet<_>>());
}
