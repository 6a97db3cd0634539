//! The outbox as a queue: what consumers of Redis Streams rely on. The rules are those of the conformance suite of `stampede-queue`, where
//! they apply: there are no partitions and no markers, and publishing is part of the admission.

use std::time::Duration;

use stampede_core::SaleId;
use stampede_core::ports::{Gate as _, GateError, LoadedSale};
use stampede_core::{Sale, SaleStatus};
use stampede_gate::RedisGate;
use stampede_gate::redis::{Entry, EntryId};
use stampede_redis::Client;
use stampede_testkit::redis as server;
use stampede_testkit::{Server, until};

use crate::conformance::{request, sale};
use crate::{TIMEOUT, redis_gate};

/// Longer than a test takes.
const LONG: Duration = Duration::from_secs(600);
const FIRST_ENTRY: &str = "0-0";

/// A gate with sales, and a connection for its consumers.
struct Outboxes {
    server: Server,
    gate: RedisGate,
    client: Client,
}

impl Outboxes {
    async fn start(server: Server, sales: &[SaleId]) -> Self {
        let gate = redis_gate(server.port(), "a", 1);
        gate.load_scripts(1).await.unwrap();
        for &id in sales {
            let sale = Sale { id, ..sale(1000, 1, SaleStatus::OnSale) };
            gate.open(LoadedSale { sale, marks: Vec::new(), ended: Vec::new() }).await.unwrap();
        }
        let client = Client::new(server::url(server.port()).into(), TIMEOUT, TIMEOUT).unwrap();
        Self { server, gate, client }
    }

    /// Admits an order for each of these users, each in an entry of its own.
    async fn admit(&self, sale: SaleId, users: impl IntoIterator<Item = i64>) -> Vec<EntryId> {
        let mut entries = Vec::new();
        for user in users {
            let (_, entry) = self.gate.admit_batch(sale, &[request(user, 1000 + user)]).await.unwrap().unwrap();
            entries.push(entry.unwrap());
        }
        entries
    }

    async fn read(&self, consumer: &str, sale: SaleId, limit: usize) -> Vec<Entry> {
        let read = self.gate.read_new(&self.client, consumer, &[sale], limit, None).await.unwrap();
        read.into_iter().flat_map(|(_, entries)| entries).collect()
    }

    /// Claims everything of a sale that was read this long ago.
    async fn claim(&self, consumer: &str, sale: SaleId, idle: Duration) -> Vec<Entry> {
        let (mut cursor, mut claimed) = (FIRST_ENTRY.to_owned(), Vec::new());
        loop {
            claimed.extend(self.gate.claim(sale, consumer, idle, 2, &mut cursor).await.unwrap());
            if cursor == FIRST_ENTRY {
                return claimed;
            }
        }
    }

    async fn settle(&self, sale: SaleId, entries: &[EntryId]) {
        self.gate.settle_entries(sale, entries, true).await.unwrap();
    }

    /// The number of entries that are not settled, and of orders in them.
    async fn depth(&self, sale: SaleId) -> (usize, u32) {
        let snapshot = self.gate.snapshot(sale).await.unwrap().unwrap();
        (self.gate.entries(sale, None, 1000).await.unwrap().len(), snapshot.marks - snapshot.settled)
    }

    fn ask(&self, command: &[&str]) -> String {
        server::ask(self.server.port(), command).unwrap().trim().to_owned()
    }
}

fn id(number: i64) -> SaleId {
    SaleId::new(number).unwrap()
}

fn ids(entries: &[Entry]) -> Vec<EntryId> {
    entries.iter().map(|entry| entry.id).collect()
}

async fn started(sales: &[SaleId]) -> Outboxes {
    Outboxes::start(server::start().unwrap(), sales).await
}

#[tokio::test]
async fn entries_arrive_in_order_and_once() {
    let outboxes = started(&[id(1), id(2)]).await;
    let (one, other) = (outboxes.admit(id(1), 1..=5).await, outboxes.admit(id(2), 1..=3).await);
    let both = outboxes.gate.read_new(&outboxes.client, "a", &[id(1), id(2)], 2, None).await.unwrap();
    let both: Vec<_> = both.iter().map(|(sale, entries)| (*sale, ids(entries))).collect();
    assert_eq!(both, [(id(1), one[..2].to_vec()), (id(2), other[..2].to_vec())], "at most two of each sale");
    assert_eq!(ids(&outboxes.read("b", id(1), 10).await), one[2..], "each goes to one consumer");
    assert_eq!(outboxes.read("a", id(1), 10).await, []);
    let orders: Vec<_> = outboxes.read("b", id(2), 10).await[0].orders.iter().map(|o| (o.user.get(), o.seq)).collect();
    assert_eq!(orders, [(3, 3)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_consumer_gets_what_is_admitted_later() {
    let outboxes = started(&[id(1)]).await;
    let own = Client::new(server::url(outboxes.server.port()).into(), TIMEOUT, TIMEOUT).unwrap();
    let wait = Duration::from_millis(20);
    assert_eq!(outboxes.gate.read_new(&own, "a", &[id(1)], 10, Some(wait)).await.unwrap(), []);
    let sales = [id(1)];
    let reading = outboxes.gate.read_new(&own, "a", &sales, 10, Some(TIMEOUT / 2));
    let admitting = async {
        until("the consumer waits", async || outboxes.ask(&["info", "clients"]).contains("blocked_clients:1")).await;
        outboxes.admit(id(1), [1]).await
    };
    let (read, admitted) = tokio::join!(reading, admitting);
    assert_eq!(ids(&read.unwrap()[0].1), admitted);
}

#[tokio::test]
async fn unsettled_entries_are_claimed_after_the_idle_time() {
    let outboxes = started(&[id(1)]).await;
    let admitted = outboxes.admit(id(1), 1..=5).await;
    let read = outboxes.read("a", id(1), 4).await;
    assert_eq!(outboxes.claim("b", id(1), LONG).await, [], "they were read just now");
    let idle = Duration::from_millis(30);
    let mut claimed = Vec::new();
    until("the idle time is over", async || {
        claimed.extend(outboxes.claim("b", id(1), idle).await);
        claimed.len() >= 4
    })
    .await;
    claimed.dedup();
    assert_eq!(claimed, read, "in their order, and not the one that nobody has read");
    assert_eq!(outboxes.claim("a", id(1), LONG).await, [], "the idle time begins again");
    assert_eq!(ids(&outboxes.read("a", id(1), 10).await), admitted[4..]);
}

/// Another client acknowledges entries, or moves the group ahead of them: they were read, and no consumer can claim them.
#[tokio::test]
async fn entries_that_no_consumer_can_claim_are_found() {
    let outboxes = started(&[id(1)]).await;
    let admitted = outboxes.admit(id(1), 1..=5).await;
    assert_eq!(outboxes.gate.delivered(id(1), 10).await.unwrap(), [], "nothing was read");
    let read = outboxes.read("a", id(1), 2).await;
    let out = outboxes.ask(&["keys", "*:out"]);
    outboxes.ask(&["xack", out.trim(), "ledger", &admitted[0].to_string()]);
    assert_eq!(ids(&outboxes.claim("b", id(1), Duration::ZERO).await), [admitted[1]], "the other one is in no list");
    assert_eq!(outboxes.gate.delivered(id(1), 10).await.unwrap(), read, "with those that a consumer has");
    outboxes.ask(&["xgroup", "setid", out.trim(), "ledger", &admitted[3].to_string()]);
    assert_eq!(ids(&outboxes.gate.delivered(id(1), 10).await.unwrap()), admitted[..4]);
    assert_eq!(ids(&outboxes.gate.delivered(id(1), 3).await.unwrap()), admitted[..3]);
    outboxes.settle(id(1), &admitted[..4]).await;
    assert_eq!(outboxes.gate.delivered(id(1), 10).await.unwrap(), []);
    assert_eq!(ids(&outboxes.read("b", id(1), 10).await), admitted[4..]);
}

#[tokio::test]
async fn settled_entries_are_never_delivered_again() {
    let outboxes = started(&[id(1)]).await;
    let admitted = outboxes.admit(id(1), 1..=4).await;
    assert_eq!(ids(&outboxes.read("a", id(1), 3).await), admitted[..3]);
    // The last one was not read: another process has recorded it.
    for _ in 0..2 {
        outboxes.settle(id(1), &[admitted[0], admitted[2], admitted[3]]).await;
        assert_eq!(outboxes.depth(id(1)).await, (1, 1), "settling again changes nothing");
    }
    assert_eq!(outboxes.read("b", id(1), 10).await, []);
    assert_eq!(ids(&outboxes.claim("b", id(1), Duration::ZERO).await), [admitted[1]]);
    outboxes.settle(id(1), &[admitted[1]]).await;
    assert_eq!(outboxes.claim("b", id(1), Duration::ZERO).await, []);
    assert_eq!(outboxes.depth(id(1)).await, (0, 0));
}

#[tokio::test]
async fn depth_counts_what_is_not_settled() {
    let outboxes = started(&[id(1), id(2)]).await;
    assert_eq!(outboxes.depth(id(1)).await, (0, 0));
    let batch = [request(1, 11), request(2, 12), request(3, 13)];
    let (_, entry) = outboxes.gate.admit_batch(id(1), &batch).await.unwrap().unwrap();
    outboxes.admit(id(1), 4..=5).await;
    outboxes.admit(id(2), [1]).await;
    assert_eq!(outboxes.depth(id(1)).await, (3, 5));
    outboxes.read("a", id(1), 10).await;
    assert_eq!(outboxes.depth(id(1)).await, (3, 5), "reading settles nothing");
    outboxes.settle(id(1), &[entry.unwrap()]).await;
    assert_eq!((outboxes.depth(id(1)).await, outboxes.depth(id(2)).await), ((2, 2), (1, 1)));
}

/// Redis is killed after entries were admitted, read and settled.
#[tokio::test]
async fn outbox_survives_a_crash_of_redis() {
    let outboxes = Outboxes::start(server::start_durable().unwrap(), &[id(1)]).await;
    let admitted = outboxes.admit(id(1), 1..=6).await;
    assert_eq!(ids(&outboxes.read("a", id(1), 4).await), admitted[..4]);
    outboxes.settle(id(1), &admitted[..2]).await;
    outboxes.server.kill().unwrap();
    outboxes.server.restart().unwrap();
    until("the client is connected again", async || {
        outboxes.gate.entries(id(1), None, 10).await.is_ok_and(|entries| ids(&entries) == admitted[2..])
    })
    .await;
    let mut read = Vec::new();
    until("the consumer is connected again", async || {
        let new = outboxes.gate.read_new(&outboxes.client, "b", &[id(1)], 10, None).await;
        read.extend(new.into_iter().flatten().flat_map(|(_, entries)| entries));
        !read.is_empty()
    })
    .await;
    assert_eq!(ids(&read), admitted[4..]);
    assert_eq!(ids(&outboxes.claim("b", id(1), Duration::ZERO).await), admitted[2..]);
}

#[tokio::test]
async fn unreadable_entries_are_delivered_as_such() {
    let outboxes = started(&[id(1)]).await;
    let admitted = outboxes.admit(id(1), [1]).await;
    let key = outboxes.ask(&["keys", "*:out"]);
    assert_eq!(outboxes.ask(&["xadd", &key, "1-2", "not", "an entry"]), "1-2");
    let read = outboxes.read("a", id(1), 10).await;
    assert_eq!(ids(&read[..1]), admitted);
    assert_eq!(read[0].unreadable, None);
    assert_eq!(read[1].unreadable, Some(vec![b"not".to_vec(), b"an entry".to_vec()]));
    assert_eq!(read[1].orders, []);
    assert_eq!(outboxes.claim("b", id(1), Duration::ZERO).await, read, "also when they are claimed");
    outboxes.settle(id(1), &[read[1].id]).await;
    assert_eq!(outboxes.depth(id(1)).await, (1, 1));
}

#[tokio::test]
async fn consumer_with_unsettled_entries_is_not_forgotten() {
    let outboxes = started(&[id(1)]).await;
    let admitted = outboxes.admit(id(1), 1..=2).await;
    outboxes.read("busy", id(1), 1).await;
    outboxes.read("done", id(1), 1).await;
    outboxes.settle(id(1), &admitted[1..]).await;
    assert_eq!(outboxes.gate.forget_consumers(id(1), LONG).await.unwrap(), 0, "both have just read");
    let mut forgotten = 0;
    until("a consumer is forgotten", async || {
        forgotten += outboxes.gate.forget_consumers(id(1), Duration::ZERO).await.unwrap();
        forgotten > 0
    })
    .await;
    assert_eq!(outboxes.gate.forget_consumers(id(1), Duration::ZERO).await.unwrap(), 0);
    assert_eq!(forgotten, 1);
    assert_eq!(ids(&outboxes.claim("next", id(1), Duration::ZERO).await), admitted[..1]);
}

/// Only `open` creates the stream and its group, so a missing group is a loss as well.
#[tokio::test]
async fn missing_outbox_is_a_loss() {
    let outboxes = started(&[id(1), id(2)]).await;
    outboxes.admit(id(1), 1..=2).await;
    assert_eq!(outboxes.read("a", id(1), 1).await.len(), 1);
    let key = outboxes.ask(&["keys", "*{1}:out"]);
    assert_eq!(outboxes.ask(&["xgroup", "destroy", &key, "ledger"]), "1");
    assert_eq!(outboxes.ask(&["xlen", &key]), "2", "the entries are there");
    for what in ["the group", "the stream"] {
        let read = outboxes.gate.read_new(&outboxes.client, "a", &[id(2), id(1)], 10, None).await;
        assert_eq!(read, Err(GateError::Lost), "{what}");
        let claimed = outboxes.gate.claim(id(1), "a", Duration::ZERO, 10, &mut FIRST_ENTRY.to_owned()).await;
        assert_eq!(claimed, Err(GateError::Lost), "{what}");
        outboxes.ask(&["del", &key]);
    }
}

/// The markers of comparisons belong to queues outside Redis, which only report here.
#[tokio::test]
async fn marker_has_passed_when_every_partition_has_reported_it() {
    let outboxes = started(&[]).await;
    let gate = &outboxes.gate;
    let is_passed = async || gate.is_marker_passed(7, 2).await.unwrap();
    assert!(!is_passed().await);
    for _ in 0..2 {
        gate.pass_marker(7, 0).await.unwrap();
        assert!(!is_passed().await, "one of two partitions, also if it reports twice");
    }
    gate.pass_marker(8, 1).await.unwrap();
    assert!(!is_passed().await, "another comparison");
    gate.pass_marker(7, 1).await.unwrap();
    assert!(is_passed().await);
    let key = outboxes.ask(&["keys", "*{marker:7}:1"]);
    assert!(outboxes.ask(&["ttl", &key]).parse::<i64>().unwrap() > 0, "it expires");
}
