//! What gates with an outbox must do, and what they must notice.

use std::time::Duration;

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Gate, GateError, LoadedSale};
use stampede_core::*;
use stampede_gate::RedisGate;
use stampede_testkit::lua;
use stampede_testkit::redis as server;
use stampede_testkit::until;

use crate::conformance::{id, request, sale};
use crate::redis_gate;

async fn try_open(gate: &RedisGate, cap: u32, marks: Vec<(UserId, OrderId)>, epoch: i64) -> Result<(), GateError> {
    let sale = Sale { epoch: Epoch(epoch), ..sale(cap, 1, SaleStatus::OnSale) };
    gate.open(LoadedSale { sale, marks, ended: Vec::new() }).await
}

async fn open(gate: &RedisGate, cap: u32, marks: Vec<(UserId, OrderId)>, epoch: i64) {
    try_open(gate, cap, marks, epoch).await.unwrap();
}

async fn started(ledger: &str) -> (stampede_testkit::Server, RedisGate) {
    let server = server::start().unwrap();
    let gate = redis_gate(server.port(), ledger, 1);
    gate.load_scripts(1).await.unwrap();
    (server, gate)
}

async fn admissions(gate: &RedisGate, requests: &[AdmitRequest]) -> Result<Vec<Admission>, GateError> {
    let decisions = gate.admit(id(), requests, SystemClock.now()).await?.unwrap();
    Ok(decisions.iter().map(|decision| decision.admission).collect())
}

#[test]
fn script_headers_match_their_scripts() {
    assert_eq!(lua::check_headers(concat!(env!("CARGO_MANIFEST_DIR"), "/src/redis/lua")).unwrap(), 10);
}

/// The keys that `open` renames expire until then.
#[tokio::test]
async fn keys_of_an_open_sale_never_expire() {
    let (server, gate) = started("a").await;
    let once = Sale { buy_again: false, ..sale(3, 1, SaleStatus::OnSale) };
    let pair = |n| (UserId::new(n).unwrap(), OrderId::new(n).unwrap());
    gate.open(LoadedSale { sale: once, marks: vec![pair(1)], ended: vec![pair(2)] }).await.unwrap();
    admissions(&gate, &[request(3, 3)]).await.unwrap();
    let client = redis::Client::open(server::url(server.port())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let keys: Vec<String> = redis::cmd("KEYS").arg("stampede:*").query_async(&mut connection).await.unwrap();
    assert_eq!(keys.len(), 4, "{keys:?}");
    for key in keys {
        let ttl: i64 = redis::cmd("TTL").arg(&key).query_async(&mut connection).await.unwrap();
        assert_eq!(ttl, -1, "{key} expires");
    }
}

/// A lost list of those who may not buy again is noticed like lost marks.
#[tokio::test]
async fn lost_ended_orders_are_noticed() {
    let (server, gate) = started("a").await;
    let once = Sale { buy_again: false, ..sale(3, 1, SaleStatus::OnSale) };
    gate.open(LoadedSale { sale: once, marks: Vec::new(), ended: Vec::new() }).await.unwrap();
    admissions(&gate, &[request(1, 1)]).await.unwrap();
    let client = redis::Client::open(server::url(server.port())).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let _deleted: i64 = redis::cmd("DEL").arg("stampede:a:{1}:ended").query_async(&mut connection).await.unwrap();
    assert_eq!(admissions(&gate, &[request(2, 2)]).await, Err(GateError::Lost));
    let AdmitRequest { user, order } = request(1, 1);
    let release = stampede_core::ports::gate::Release { user, order, existing: None, ended: true };
    assert_eq!(gate.release(id(), &[release]).await, Err(GateError::Lost));
    assert_eq!(gate.snapshot(id()).await, Err(GateError::Lost), "also while nobody buys or cancels");
}

#[tokio::test]
async fn an_admitted_batch_is_one_entry_until_it_is_settled() {
    let (_server, gate) = started("a").await;
    open(&gate, 3, Vec::new(), 1).await;
    let batch = [request(1, 11), request(2, 21), request(1, 12)];
    let (decisions, entry) = gate.admit_batch(id(), &batch).await.unwrap().unwrap();
    let entry = entry.unwrap();
    assert_eq!((decisions[0].seq, decisions[1].seq), (1, 2));
    let entries = gate.entries(id(), None, 10).await.unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].id, entry);
    let orders: Vec<_> = entries[0].orders.iter().map(|o| (o.user.get(), o.order.get(), o.seq, o.at)).collect();
    assert_eq!(orders, [(1, 11, 1, decisions[0].at), (2, 21, 2, decisions[0].at)]);
    let snapshot = gate.snapshot(id()).await.unwrap().unwrap();
    assert_eq!((snapshot.marks, snapshot.settled), (2, 0));

    // A batch without a new order makes no entry.
    assert_eq!(gate.admit_batch(id(), &[request(1, 11)]).await.unwrap().unwrap().1, None);

    for _ in 0..2 {
        gate.settle_entries(id(), &[entry], false).await.unwrap();
        let snapshot = gate.snapshot(id()).await.unwrap().unwrap();
        assert_eq!((snapshot.marks, snapshot.settled), (2, 2), "settling again changes nothing");
    }
    assert_eq!(gate.entries(id(), None, 10).await.unwrap(), []);
}

#[tokio::test]
async fn a_full_outbox_refuses_new_orders_only() {
    let server = server::start().unwrap();
    let client =
        stampede_redis::Client::new(server::url(server.port()).into(), crate::TIMEOUT, crate::TIMEOUT).unwrap();
    let gate = RedisGate::new(client.into(), &crate::record("a", 1, ""), 1);
    gate.load_scripts(1).await.unwrap();
    open(&gate, 3, Vec::new(), 1).await;
    let (_, entry) = gate.admit_batch(id(), &[request(1, 11)]).await.unwrap().unwrap();
    let held = Admission::AlreadyHas(OrderId::new(11).unwrap());
    assert_eq!(admissions(&gate, &[request(2, 21), request(1, 12)]).await.unwrap(), [Admission::Busy, held]);
    gate.settle_entries(id(), &[entry.unwrap()], false).await.unwrap();
    let admitted = Admission::Admitted(OrderId::new(21).unwrap());
    assert_eq!(admissions(&gate, &[request(2, 21)]).await.unwrap(), [admitted]);
}

#[tokio::test]
async fn every_loss_of_memory_is_noticed() {
    let losses: [(&str, &[&str]); 5] = [
        ("the scripts", &["script", "flush"]),
        ("the sale", &["del", "stampede:a:{1}:sale"]),
        ("the marks", &["del", "stampede:a:{1}:live"]),
        ("the outbox", &["del", "stampede:a:{1}:out"]),
        ("admissions", &["hset", "stampede:a:{1}:sale", "seq", "0"]),
    ];
    for (what, command) in losses {
        let (server, gate) = started("a").await;
        open(&gate, 3, Vec::new(), 1).await;
        admissions(&gate, &[request(1, 11)]).await.unwrap();
        server::ask(server.port(), command).unwrap();
        assert_eq!(admissions(&gate, &[request(2, 21)]).await, Err(GateError::Lost), "{what}");
    }
}

#[tokio::test]
async fn an_edit_after_a_loss_of_memory_writes_nothing() {
    let (server, gate) = started("a").await;
    open(&gate, 3, Vec::new(), 1).await;
    server::ask(server.port(), &["del", "stampede:a:{1}:live"]).unwrap();
    assert_eq!(gate.edit(&sale(1, 9, SaleStatus::OnSale)).await, Err(GateError::Lost));
    assert_eq!(gate.snapshot(id()).await, Err(GateError::Lost));
    assert_eq!(server::ask(server.port(), &["hget", "stampede:a:{1}:sale", "ver"]).unwrap(), "1");
}

/// A node that has missed a rebuild, or knows of one that the gate has not seen, edits nothing.
#[tokio::test]
async fn an_edit_under_another_incarnation_or_epoch_writes_nothing() {
    let server = server::start().unwrap();
    let gate = redis_gate(server.port(), "a", 2);
    gate.load_scripts(2).await.unwrap();
    open(&gate, 3, Vec::new(), 2).await;
    let keys = || server::ask(server.port(), &["hgetall", "stampede:a:{1}:sale"]).unwrap();
    let before = keys();
    let edited = |epoch: i64| Sale { epoch: Epoch(epoch), ..sale(5, 9, SaleStatus::Paused) };
    let node = async |incarnation: u64, epoch: i64| {
        let node = redis_gate(server.port(), "a", incarnation);
        node.load_scripts(incarnation).await.unwrap();
        node.adopt(&edited(epoch));
        node
    };
    for (incarnation, epoch) in [(1, 2), (3, 2), (2, 1), (2, 3)] {
        let other = node(incarnation, epoch).await;
        let what = format!("incarnation {incarnation}, epoch {epoch}");
        assert_eq!(other.edit(&edited(epoch)).await, Err(GateError::Lost), "{what}");
        assert_eq!(other.snapshot(id()).await, Err(GateError::Lost), "{what}");
        assert_eq!(keys(), before, "{what}");
    }
    assert_eq!(node(2, 2).await.edit(&edited(2)).await, Ok(Some(5)));
    assert_ne!(keys(), before);
}

#[tokio::test]
async fn a_closed_sale_is_opened_by_a_higher_epoch_only() {
    let (server, old) = started("a").await;
    open(&old, 3, Vec::new(), 1).await;
    admissions(&old, &[request(1, 11)]).await.unwrap();

    let new = redis_gate(server.port(), "a", 2);
    new.load_scripts(2).await.unwrap();
    assert!(new.close(id(), Epoch(1), 2).await.unwrap());
    assert_eq!(admissions(&old, &[request(2, 21)]).await, Err(GateError::Lost));
    assert!(!old.close(id(), Epoch(1), 1).await.unwrap(), "an older incarnation cannot close it");
    new.adopt(&sale(3, 1, SaleStatus::OnSale));
    assert_eq!(new.edit(&sale(5, 9, SaleStatus::OnSale)).await, Err(GateError::Lost), "an edit would open it");
    assert_eq!(new.snapshot(id()).await, Err(GateError::Lost), "it shows nothing of a closed sale");
    let fields = server::ask(server.port(), &["hmget", "stampede:a:{1}:sale", "state", "ver", "cap"]).unwrap();
    assert_eq!(fields.lines().collect::<Vec<_>>(), ["closed", "1", "3"]);

    let mark = (UserId::new(1).unwrap(), OrderId::new(11).unwrap());
    assert_eq!(try_open(&new, 3, vec![mark], 1).await, Err(GateError::Lost), "the epoch has to rise");
    open(&new, 3, vec![mark], 2).await;
    let held = Admission::AlreadyHas(mark.1);
    assert_eq!(admissions(&new, &[request(1, 12)]).await.unwrap(), [held]);
    assert_eq!(admissions(&old, &[request(2, 21)]).await, Err(GateError::Lost), "the old incarnation stays out");
    assert_eq!(try_open(&old, 3, Vec::new(), 3).await, Err(GateError::Lost));
    assert_eq!(admissions(&new, &[request(1, 12)]).await.unwrap(), [held], "an older incarnation cannot open it");
}

/// Two nodes open the same sale under one incarnation: what the faster one has admitted is not lost.
#[tokio::test]
async fn a_sale_that_was_opened_meanwhile_is_neither_closed_nor_opened_again() {
    let (server, fast) = started("a").await;
    let slow = redis_gate(server.port(), "a", 1);
    for gate in [&fast, &slow] {
        assert!(gate.close(id(), Epoch(1), 1).await.unwrap());
    }
    open(&fast, 3, Vec::new(), 2).await;
    admissions(&fast, &[request(1, 11)]).await.unwrap();
    assert!(!slow.close(id(), Epoch(1), 1).await.unwrap(), "it is open under a higher epoch");
    assert_eq!(try_open(&slow, 3, Vec::new(), 1).await, Err(GateError::Lost));
    let held = Admission::AlreadyHas(OrderId::new(11).unwrap());
    assert_eq!(admissions(&fast, &[request(1, 12)]).await.unwrap(), [held], "it is open");

    // The ledger has given the sale the epoch 3, and the node that is to open it under that is slow.
    assert!(fast.close(id(), Epoch(3), 1).await.unwrap());
    assert_eq!(try_open(&slow, 3, Vec::new(), 3).await, Err(GateError::Lost), "it was closed since");
    open(&fast, 3, Vec::new(), 4).await;
}

/// A task of the node has followed the ledger to the incarnation of another rebuild, while this one was under way.
#[tokio::test]
async fn a_rebuild_makes_no_call_under_another_incarnation() {
    let (server, gate) = started("a").await;
    open(&gate, 3, Vec::new(), 1).await;
    gate.set_incarnation(&crate::record("a", 2, ""));
    let keys = || server::ask(server.port(), &["hgetall", "stampede:a:{1}:sale"]).unwrap();
    let (before, sale) = (keys(), Sale { epoch: Epoch(2), ..sale(3, 1, SaleStatus::OnSale) });
    assert_eq!(gate.load_scripts(1).await, Err(GateError::Lost));
    assert_eq!(gate.close(id(), Epoch(1), 1).await, Err(GateError::Lost));
    let loaded = LoadedSale { sale, marks: Vec::new(), ended: Vec::new() };
    assert_eq!(gate.open_under(1, loaded.clone()).await, Err(GateError::Lost));
    assert!(!gate.has_scripts().await.unwrap(), "no script of the other incarnation was loaded");
    assert_eq!(keys(), before);
    assert_eq!(gate.opened_as(id()), None);

    // The rebuild to which the incarnation belongs makes them.
    gate.load_scripts(2).await.unwrap();
    assert!(gate.close(id(), Epoch(1), 2).await.unwrap());
    gate.open_under(2, loaded).await.unwrap();
    assert_eq!(gate.opened_as(id()), Some((2, Epoch(2))));
}

/// The clock of Redis was ahead for a moment: the time that it had then counts until the sale is rebuilt.
#[tokio::test]
async fn highest_time_ends_with_the_epoch() {
    let (server, gate) = started("a").await;
    open(&gate, 3, Vec::new(), 1).await;
    let ahead = SystemClock.now().plus(Duration::from_secs(1800));
    server::ask(server.port(), &["hset", "stampede:a:{1}:sale", "hw", &ahead.ms().to_string()]).unwrap();
    let time = async |n| gate.admit(id(), &[request(n, n)], SystemClock.now()).await.unwrap().unwrap()[0].at;
    assert_eq!(time(1).await, ahead);
    assert!(gate.close(id(), Epoch(1), 1).await.unwrap());
    open(&gate, 3, Vec::new(), 2).await;
    assert!(time(2).await < ahead);
}

#[tokio::test]
async fn installations_on_one_server_do_not_meet() {
    let (server, one) = started("a").await;
    let other = redis_gate(server.port(), "b", 1);
    assert!(one.has_scripts().await.unwrap() && !other.has_scripts().await.unwrap());
    other.load_scripts(1).await.unwrap();
    open(&one, 1, Vec::new(), 1).await;
    open(&other, 1, Vec::new(), 1).await;
    let admitted = |order| Admission::Admitted(OrderId::new(order).unwrap());
    assert_eq!(admissions(&one, &[request(1, 11)]).await.unwrap(), [admitted(11)]);
    assert_eq!(admissions(&other, &[request(1, 12)]).await.unwrap(), [admitted(12)]);
}

#[tokio::test]
async fn a_sale_is_removed_once_its_outbox_is_empty() {
    let (server, gate) = started("a").await;
    open(&gate, 3, Vec::new(), 1).await;
    let (_, entry) = gate.admit_batch(id(), &[request(1, 11)]).await.unwrap().unwrap();
    assert!(!gate.remove(id()).await.unwrap());
    gate.settle_entries(id(), &[entry.unwrap()], false).await.unwrap();
    assert!(gate.remove(id()).await.unwrap());
    assert_eq!(server::ask(server.port(), &["dbsize"]).unwrap(), "0");
    assert_eq!(gate.admit(id(), &[request(1, 12)], SystemClock.now()).await.unwrap(), None);
}

/// The gate was rebuilt after the sale was over, so its keys are of an older incarnation, and no node knows it as open.
#[tokio::test]
async fn a_sale_of_an_older_incarnation_is_removed_once_it_is_closed_and_its_outbox_is_empty() {
    let (server, old) = started("a").await;
    open(&old, 3, Vec::new(), 4).await;
    let (_, entry) = old.admit_batch(id(), &[request(1, 11)]).await.unwrap().unwrap();
    let other = SaleId::new(2).unwrap();
    let gate = redis_gate(server.port(), "a", 2);
    gate.load_scripts(2).await.unwrap();
    assert!(gate.has_keys(&[other, id()]).await.unwrap() && !gate.has_keys(&[other]).await.unwrap());
    assert!(!gate.remove_closed(id()).await.unwrap(), "it is not closed");
    // The ledger may have a higher epoch.
    assert!(gate.close(id(), Epoch(5), 2).await.unwrap());
    assert!(!gate.remove_closed(id()).await.unwrap(), "its outbox is not empty");
    gate.settle_entries(id(), &[entry.unwrap()], false).await.unwrap();
    assert!(gate.remove_closed(id()).await.unwrap());
    assert!(!gate.has_keys(&[id()]).await.unwrap());
    assert_eq!(server::ask(server.port(), &["dbsize"]).unwrap(), "0");
    assert!(gate.remove_closed(id()).await.unwrap(), "another node may have removed it");
}

/// A master that was a replica for a while still has the scripts, and the older copy of the server that it replicated.
#[tokio::test]
async fn a_server_with_another_history_is_lost() {
    let (master, copy) = (server::start().unwrap(), server::start().unwrap());
    let replicate = async |port: u16, of: u16| {
        server::ask(port, &["replicaof", "127.0.0.1", &of.to_string()]).unwrap();
        until("it is replicated", async || {
            server::ask(port, &["info", "replication"]).unwrap().contains("master_link_status:up")
        })
        .await;
    };
    replicate(copy.port(), master.port()).await;
    let replication_id = redis_gate(master.port(), "a", 1).replication_id().await.unwrap();
    let gate = |port: u16| {
        let client = stampede_redis::Client::new(server::url(port).into(), crate::TIMEOUT, crate::TIMEOUT).unwrap();
        RedisGate::new(client.into(), &crate::record("a", 1, &replication_id), 10)
    };
    let (one, other) = (gate(master.port()), gate(master.port()));
    one.load_scripts(1).await.unwrap();
    open(&one, 3, Vec::new(), 1).await;
    other.adopt(&sale(3, 1, SaleStatus::OnSale));
    admissions(&other, &[request(1, 11)]).await.unwrap();
    until("the copy has the sale", async || {
        server::ask(copy.port(), &["hexists", "stampede:a:{1}:live", "1"]).unwrap() == "1"
    })
    .await;
    server::ask(copy.port(), &["replicaof", "no", "one"]).unwrap();
    admissions(&one, &[request(2, 21)]).await.unwrap();
    replicate(master.port(), copy.port()).await;
    server::ask(master.port(), &["replicaof", "no", "one"]).unwrap();
    assert_eq!(server::ask(master.port(), &["hexists", "stampede:a:{1}:live", "2"]).unwrap(), "0", "it has the copy");

    // A node that has just started, and one that has not seen the order that is missing.
    let new = gate(master.port());
    assert!(new.has_scripts().await.unwrap());
    new.adopt(&sale(3, 1, SaleStatus::OnSale));
    assert_eq!(admissions(&new, &[request(3, 31)]).await, Err(GateError::Lost));
    assert_eq!(other.verify_server().await, Err(GateError::Lost));
    assert_eq!(admissions(&other, &[request(3, 31)]).await, Err(GateError::Lost));
}
