//! Entries of the outbox that are delivered twice, or that something else has written; an outbox that is full,
//! survives a crash of Redis, or is lost with everything else.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use sqlx::Connection as _;
use stampede_core::SaleId;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{count, rabbitmq, redis, until};

use super::rabbitmq::rows;
use super::runs::{self, Queue};
use super::stories::dead_letters_command;
use super::stuck::lock_sale;
use super::{Consumers, outbox, start};
use crate::outage::spawn_buyers_on;
use crate::quarantine::{accept_orders_again, execute, reject_orders_of};
use crate::shared::{Nodes, entries, storm};
use crate::shop::{Buyer, Kind, Shop, TOKEN};

/// Appends the entries of the stream `KEYS[1]` with these numbers to the stream `KEYS[2]`, with ids from `1-ARGV[1]` on.
const APPEND: &str = "local entries = redis.call('XRANGE', KEYS[1], '-', '+')
    for n = 2, #ARGV do
        redis.call('XADD', KEYS[2], '1-' .. (ARGV[1] + n), unpack(entries[tonumber(ARGV[n])][2]))
    end";

/// Half of all entries are delivered twice and in another order, and all of them once more after orders were cancelled: nothing is recorded
/// twice, and a cancelled order stays cancelled.
async fn repeated_entries_do_no_harm(kind: Kind) {
    for seed in 0..count(5, 1) {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = start(kind, 2);
        let everyone = nodes.shops[0].log_in(0, 40).await;
        let sale = nodes.create_sale(20).await;
        let history = Arc::new(Recorder::default());
        // A few at a time, so that there are several entries.
        for some in everyone.chunks(5) {
            nodes.storm(&history, sale, some, 1).await;
        }
        let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
        let out = ask(&["keys", &outbox(sale)]);
        let count: usize = ask(&["xlen", &out]).parse().unwrap();
        assert!(count >= 4, "{count} entries");
        ask(&["copy", &out, "taken"]);
        let append = |first: &str, numbers: &[usize]| {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            let fixed = ["eval", APPEND, "2", "taken", &out, first];
            ask(&fixed.into_iter().chain(numbers.iter().map(String::as_str)).collect::<Vec<_>>())
        };
        ask(&["xtrim", &out, "maxlen", "0"]);
        let mut numbers: Vec<usize> = (1..=count).chain((1..=count).filter(|_| rng.random_bool(0.5))).collect();
        numbers.shuffle(&mut rng);
        eprintln!("seed {seed}: {count} entries, {} deliveries", numbers.len());
        append("1000", &numbers);
        let consumers = Consumers::start(&nodes, 2);
        until("the entries are settled", async || entries(&nodes.redis, &out) == 0).await;
        assert_eq!(rows(&nodes, sale).await, 20);

        let mut cancelled: Vec<_> =
            history.ended().iter().filter_map(|a| a.order.map(|order| (order, a.user))).collect();
        cancelled.sort_unstable();
        cancelled.dedup();
        cancelled.truncate(3);
        let mut client = nodes.shops[1].client().await;
        for &(order, user) in &cancelled {
            let buyer = everyone.iter().find(|buyer| buyer.id == user).unwrap();
            assert_eq!(history.cancel(&mut client, sale, buyer, order).await.response, Response::Cancelled);
        }
        append("2000", &(1..=count).collect::<Vec<_>>());
        until("the entries are settled", async || entries(&nodes.redis, &out) == 0).await;
        for &(order, user) in &cancelled {
            let buyer = everyone.iter().find(|buyer| buyer.id == user).unwrap();
            let shown = client.get(&format!("/v1/orders/{order}"), &buyer.token).await.unwrap();
            assert_eq!(shown.text("status"), "cancelled");
        }
        // The gate appends entries where it left off.
        ask(&["xsetid", &out, "1-20"]);
        ask(&["xgroup", "setid", &out, "ledger", "1-20"]);
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 20);
        consumers.stop();
    }
}

/// Another client of Redis acknowledges entries that were not recorded, and moves the consumer group ahead of others, so that no consumer
/// can read or claim them. They are recorded all the same, while the sale goes on.
async fn entries_that_no_consumer_can_read_are_recorded(kind: Kind) {
    let nodes = start(kind, 1);
    let everyone = nodes.shops[0].log_in(0, 9).await;
    let (sale, history) = (nodes.create_sale(9).await, Arc::new(Recorder::default()));
    for buyer in &everyone[..8] {
        nodes.storm(&history, sale, std::slice::from_ref(buyer), 1).await;
    }
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
    let out = ask(&["keys", &outbox(sale)]);
    assert_eq!(entries(&nodes.redis, &out), 8);
    ask(&["xreadgroup", "group", "ledger", "stranger", "count", "3", "streams", &out, ">"]);
    for seq in 1..=3 {
        ask(&["xack", &out, "ledger", &format!("1-{seq}")]);
    }
    ask(&["xgroup", "setid", &out, "ledger", "1-6"]);
    let consumers = Consumers::start(&nodes, 2);
    until("those that can be read are recorded", async || rows(&nodes, sale).await >= 2).await;
    nodes.storm(&history, sale, &everyone[8..], 1).await;
    until("the entries are settled", async || entries(&nodes.redis, &out) == 0).await;
    assert_eq!(nodes.verify(&history, sale).await, 9);
    consumers.stop();
}

/// Entries with arbitrary bytes become dead letters, which operators see and discard. The others are recorded, the sale goes on, and the
/// orders of the entries are recorded from their marks.
async fn arbitrary_bytes_become_dead_letters(queue: Queue<'_>, kind: Kind) {
    for seed in 0..count(20, 2) {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = queue.start_with(kind, 1, |mut command| {
            command.env("STAMPEDE__QUEUE__CONSUME", "false");
            command.env("STAMPEDE__RECONCILE__INTERVAL_MS", "500").env("STAMPEDE__RECONCILE__CONFIRM_AFTER_MS", "500");
            command
        });
        let everyone = nodes.shops[0].log_in(0, 16).await;
        let (sale, other) = (nodes.create_sale(12).await, nodes.create_sale(2).await);
        let (history, of_other) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
        if let Queue::RabbitMq(broker) = queue {
            broker.kill().unwrap();
        }
        for (sale, history, buyers) in [(sale, &history, &everyone[..8]), (other, &of_other, &everyone[..1])] {
            leave_in_the_outbox(queue, &nodes, sale, history, buyers).await;
        }
        let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
        let out = ask(&["keys", &outbox(sale)]);
        let mut script = "local entries = redis.call('XRANGE', KEYS[1], '-', '+')
            redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)
            redis.call('XSETID', KEYS[1], '0-0')
            local garbage = {}\n"
            .to_owned();
        let damaged: Vec<usize> = (1..=8).filter(|n| *n == 2 || rng.random_bool(0.4)).collect();
        for n in &damaged {
            writeln!(script, "garbage[{n}] = {{{}}}", arbitrary_fields(&mut rng)).unwrap();
        }
        script += "for n, entry in ipairs(entries) do
                redis.call('XADD', KEYS[1], entry[1], unpack(garbage[n] or entry[2]))
            end
            return #entries";
        eprintln!("seed {seed}: {script}");
        assert_eq!(ask(&["eval", &script, "1", &out]), "8");

        if let Queue::RabbitMq(broker) = queue {
            broker.restart().unwrap();
        }
        let _consumers = queue.consumers(&nodes, 1);
        let shop = &nodes.shops[0];
        let letters = async || shop.client().await.get("/admin/v1/dead-letters", TOKEN).await.unwrap().json();
        let ids = async || -> Vec<String> {
            let letters = letters().await;
            let letters = letters["dead_letters"].as_array().cloned().unwrap_or_default();
            letters.iter().map(|letter| letter["id"].as_str().unwrap().to_owned()).collect()
        };
        until("each of them is a dead letter", async || ids().await.len() == damaged.len()).await;
        until("the outbox is empty", async || entries(&nodes.redis, &out) == 0).await;
        for id in ids().await {
            let (done, text) = dead_letters_command(shop, &["show", &id]);
            assert!(done && text.contains(&id), "{text}");
            let (done, text) = dead_letters_command(shop, &["retry", &id]);
            assert!(!done && text.contains("still cannot be read"), "{text}");
            let (done, text) = dead_letters_command(shop, &["discard", &id]);
            assert!(done && text.contains("discarded"), "{text}");
        }
        assert_eq!(ids().await, Vec::<String>::new());
        for (sale, history, stock) in [(sale, &history, 12), (other, &of_other, 2)] {
            sell_out(&nodes, sale, history, &everyone).await;
            assert_eq!(nodes.verify(history, sale).await, stock);
        }
    }
}

/// Makes the entries of the outbox `KEYS[1]` of the sale `ARGV[1]`, a hash at `KEYS[3]`, entries of the dead letters `KEYS[2]`, as a version
/// does that cannot read them.
const MAKE_DEAD: &str = "for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
        redis.call('XADD', KEYS[2], '*', 'sale', ARGV[1], 'entry', entry[1], unpack(entry[2]))
        redis.call('XDEL', KEYS[1], entry[1])
    end
    redis.call('HSET', KEYS[3], 'pending', '0')";

/// Entries that an older version could not read are recorded after the update, when they are retried.
async fn readable_dead_letters_are_recorded(kind: Kind) {
    let nodes = start(kind, 1);
    let buyers = nodes.shops[0].log_in(0, 2).await;
    let sale = nodes.create_sale(2).await;
    let history = Recorder::default();
    leave_in_the_outbox(Queue::Stream, &nodes, sale, &history, &buyers).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
    let out = ask(&["keys", &outbox(sale)]);
    let dead = format!("{}:dead", out.split_once(":{").unwrap().0);
    ask(&["eval", MAKE_DEAD, "3", &out, &dead, &out.replace(":out", ":sale"), &sale.to_string()]);
    runs::retried_dead_letters_are_recorded(&nodes, sale).await;
    assert_eq!(nodes.verify(&history, sale).await, 2);
}

/// The database rejects the order of a dead letter that is retried: it is kept, and recorded when it is retried once more.
async fn dead_letter_that_cannot_be_recorded_is_kept(kind: Kind) {
    let nodes = start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 1).await;
    let sale = nodes.create_sale(1).await;
    let history = Recorder::default();
    leave_in_the_outbox(Queue::Stream, &nodes, sale, &history, &buyers).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
    let out = ask(&["keys", &outbox(sale)]);
    let dead = format!("{}:dead", out.split_once(":{").unwrap().0);
    ask(&["eval", MAKE_DEAD, "3", &out, &dead, &out.replace(":out", ":sale"), &sale.to_string()]);
    execute(kind, &nodes.storages[0], &reject_orders_of(kind, &[buyers[0].id])).await;
    let letters = runs::dead_letters(shop).await;
    assert_eq!(letters.len(), 1);
    let (done, text) = dead_letters_command(shop, &["retry", &letters[0]]);
    assert!(!done && text.contains("503"), "{text}");
    assert_eq!(runs::dead_letters(shop).await, letters);
    execute(kind, &nodes.storages[0], accept_orders_again(kind)).await;
    let (done, text) = dead_letters_command(shop, &["retry", &letters[0]]);
    assert!(done, "{text}");
    assert_eq!(runs::dead_letters(shop).await, Vec::<String>::new());
    assert_eq!(rows(&nodes, sale).await, 1);
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// Redis does not store a dead letter, because another program has written to its key: a rebuild does not open the sale before, which would
/// delete the entry.
async fn rebuild_keeps_what_cannot_be_stored_as_a_dead_letter(kind: Kind) {
    let nodes = start(kind, 1);
    let shop = &nodes.shops[0];
    let buyers = shop.log_in(0, 1).await;
    let sale = nodes.create_sale(1).await;
    let history = Recorder::default();
    leave_in_the_outbox(Queue::Stream, &nodes, sale, &history, &buyers).await;
    let ask = |command: &[&str]| redis::ask(nodes.redis.port(), command).unwrap().trim().to_owned();
    let out = ask(&["keys", &outbox(sale)]);
    let dead = format!("{}:dead", out.split_once(":{").unwrap().0);
    ask(&["xadd", &out, "1-50", "not", "an entry"]);
    ask(&["set", &dead, "not a stream"]);
    let rebuilt = shop.admin("gate/rebuild", &Value::Null).await;
    assert_eq!(rebuilt.status, 503, "{:?}", rebuilt.body);
    assert!(ask(&["xrange", &out, "1-50", "1-50"]).contains("an entry"), "it is still there");
    ask(&["del", &dead]);
    nodes.wait_until_ready().await;
    nodes.wait_until_open(sale).await;
    assert_eq!(runs::dead_letters(shop).await.len(), 1);
    assert_eq!(nodes.verify(&history, sale).await, 1);
}

/// Nothing records the orders: buyers are accepted up to the bound of the outbox and then refused, owners get their orders all the same.
/// Consumers then record everything, and the sale goes on.
async fn full_outbox_refuses_until_it_is_drained(kind: Kind) {
    const BOUND: usize = 5;
    let nodes = Queue::Stream.start_with(kind, 1, |mut command| {
        command.env("STAMPEDE__QUEUE__CONSUME", "false").env("STAMPEDE__QUEUE__MAX_BATCHES", BOUND.to_string());
        command
    });
    let everyone = nodes.shops[0].log_in(0, 2 * BOUND as u64).await;
    let (first, others) = everyone.split_at(BOUND);
    let sale = nodes.create_sale(2 * BOUND as u32).await;
    let history = Recorder::default();
    leave_in_the_outbox(Queue::Stream, &nodes, sale, &history, first).await;
    let (mut client, path) = (nodes.shops[0].client().await, format!("/v1/sales/{sale}/orders"));
    for buyer in others {
        let refused = client.post(&path, &buyer.token, &Value::Null).await.unwrap();
        let answer = (refused.status.as_u16(), refused.text("code"), refused.header("retry-after").to_owned());
        assert_eq!(answer, (503, "busy".to_owned(), "1".to_owned()));
    }
    for buyer in first {
        assert_eq!(history.buy(&mut client, sale, buyer).await.response, Response::Pending);
    }
    assert_eq!(entries(&nodes.redis, &outbox(sale)), BOUND as u64);
    assert_eq!(rows(&nodes, sale).await, 0);
    let consumers = Queue::Stream.consumers(&nodes, 1);
    until("the outbox is drained", async || entries(&nodes.redis, &outbox(sale)) == 0).await;
    assert_eq!(rows(&nodes, sale).await, BOUND);
    for buyer in others {
        // The outbox may be full again for a moment.
        until("the order is accepted", async || {
            let attempt = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
            matches!(attempt.response, Response::Pending | Response::Already)
        })
        .await;
    }
    assert_eq!(nodes.verify(&history, sale).await, 2 * BOUND);
    consumers.stop();
}

/// Redis loses everything. Orders that were accepted and not recorded are lost with it, as it is documented; those that were recorded are
/// kept, and nothing is sold beyond the stock.
async fn recorded_orders_survive_an_empty_redis(kind: Kind) {
    // It writes nothing to disk, which must be allowed.
    let allowed = |mut command: Command| {
        command.env("STAMPEDE__QUEUE__ALLOW_WITHOUT_AOF", "true");
        command
    };
    let without_consumer = |_: usize, command: Command| {
        let mut command = allowed(Queue::Stream.node(command));
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    };
    let consumer = |command| allowed(Queue::Stream.node(command));
    for seed in 0..count(5, 1) {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = Nodes::start_on(kind, redis::start().unwrap(), 2, without_consumer);
        let everyone = nodes.shops[0].log_in(0, 60).await;
        let sale = nodes.create_sale(25).await;
        let (history, lost) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
        let recorded: usize = rng.random_range(5..15);
        eprintln!("seed {seed}: {recorded} orders are recorded");
        let consumers = Consumers::start_with(&nodes, 1, consumer);
        nodes.storm(&history, sale, &everyone[..recorded], 1).await;
        until("they are recorded", async || Queue::Stream.is_idle(&nodes, sale, recorded).await).await;
        assert_eq!(rows(&nodes, sale).await, recorded);
        consumers.stop();
        let before: HashMap<_, _> = history.ended().iter().map(|attempt| (attempt.user, attempt.order)).collect();

        // The others are in Redis only, and more are being admitted when it dies.
        nodes.storm(&lost, sale, &everyone[15..20], 1).await;
        assert_eq!(lost.count(Response::Pending), 10, "five orders, each named twice");
        let load = {
            let addresses: Vec<_> = nodes.shops.iter().map(|shop| shop.address).collect();
            let (lost, some) = (lost.clone(), everyone[20..].to_vec());
            tokio::spawn(async move { storm(&addresses, &lost, sale, &some, 2).await })
        };
        nodes.redis.kill().unwrap();
        nodes.redis.restart().unwrap();
        load.await.unwrap();
        nodes.wait_until_open(sale).await;
        let consumers = Consumers::start_with(&nodes, 1, consumer);
        for (n, buyer) in everyone.iter().enumerate() {
            until("there is an answer", async || {
                history.buy(&mut nodes.shops[n % 2].client().await, sale, buyer).await.response != Response::Unknown
            })
            .await;
        }
        assert_eq!(nodes.verify(&history, sale).await, 25);
        for attempt in history.ended().iter().filter(|attempt| attempt.response.is_confirmation()) {
            let kept = before.get(&attempt.user).copied().flatten();
            assert!(kept.is_none() || attempt.order == kept, "{attempt:?}: {kept:?} was recorded");
        }
        consumers.stop();
    }
}

/// Redis is killed and starts again with its append-only file, while nodes sell and consumers are recording. The orders that are accepted just
/// before are in Redis only: each of them is recorded.
async fn accepted_orders_survive_a_crash_of_redis(kind: Kind) {
    const RECORDED: usize = 5;
    for seed in 0..count(5, 1) {
        let wanted: usize = StdRng::seed_from_u64(seed).random_range(1..20);
        eprintln!("seed {seed}: Redis is killed after {wanted} orders that are not recorded");
        let nodes = Queue::Stream.start(kind, 2);
        let consumers = Queue::Stream.consumers(&nodes, 2);
        let everyone = nodes.shops[0].log_in(0, 60).await;
        let sale = nodes.create_sale(40).await;
        let history = Arc::new(Recorder::default());
        nodes.storm(&history, sale, &everyone[..RECORDED], 1).await;
        until("the first orders are recorded", async || rows(&nodes, sale).await == RECORDED).await;

        // Until Redis has started again, the database records nothing of the sale.
        let lock = lock_sale(&nodes, sale).await;
        let accepted = history.count(Response::Pending);
        let shops: Vec<&Shop> = nodes.shops.iter().collect();
        let buying = spawn_buyers_on(&shops, sale, &everyone[RECORDED..], &history, Duration::from_millis(600));
        until("orders are accepted", async || history.count(Response::Pending) >= accepted + wanted).await;
        assert_eq!(rows(&nodes, sale).await, RECORDED, "the others are in Redis only");
        nodes.redis.kill().unwrap();
        nodes.redis.restart().unwrap();
        lock.close().await.unwrap();
        for buyer in buying {
            buyer.await.unwrap();
        }
        nodes.storm(&history, sale, &everyone, 1).await;
        assert_eq!(nodes.verify(&history, sale).await, 40);
        consumers.stop();
    }
}

/// Buys one order for each buyer, each an entry of its own that stays in the outbox.
async fn leave_in_the_outbox(queue: Queue<'_>, nodes: &Nodes, sale: SaleId, history: &Recorder, buyers: &[Buyer]) {
    let response = match queue {
        Queue::Stream => Response::Pending,
        Queue::RabbitMq(_) => Response::Unknown,
    };
    for (n, buyer) in buyers.iter().enumerate() {
        let attempt = history.buy(&mut nodes.shops[0].client().await, sale, buyer).await;
        assert_eq!(attempt.response, response);
        assert_eq!(entries(&nodes.redis, &outbox(sale)), n as u64 + 1);
    }
}

/// Everyone tries until the sale is sold out.
async fn sell_out(nodes: &Nodes, sale: SaleId, history: &Arc<Recorder>, everyone: &[Buyer]) {
    let shop: &Shop = &nodes.shops[0];
    for buyer in everyone {
        until("there is an answer", async || {
            history.buy(&mut shop.client().await, sale, buyer).await.response != Response::Unknown
        })
        .await;
    }
}

/// Fields and values of an entry that the gate would not write, as Lua strings.
fn arbitrary_fields(rng: &mut StdRng) -> String {
    const MAX: &[u8] = b"9223372036854775807";
    let chosen: Vec<Vec<u8>> = match rng.random_range(0..6) {
        // Its second order has no sequence number.
        0 => [b"first", MAX, b"at", b"1", b"1", b"1", b"2", b"2"].map(<[u8]>::to_vec).into(),
        1 => [b"first", &b"1"[..], b"at", b"\xff"].map(<[u8]>::to_vec).into(),
        2 => [b"first", &b"1"[..], b"at", b"1", b"-1", b"\xc3\x28"].map(<[u8]>::to_vec).into(),
        3 => vec![Vec::new(), Vec::new()],
        _ => {
            let pairs = rng.random_range(1..6);
            (0..2 * pairs).map(|_| (0..rng.random_range(0..40)).map(|_| rng.random()).collect()).collect()
        }
    };
    let quoted = |bytes: &Vec<u8>| {
        let escaped: String = bytes.iter().map(|byte| format!("\\{byte:03}")).collect();
        format!("'{escaped}'")
    };
    chosen.iter().map(quoted).collect::<Vec<_>>().join(", ")
}

async fn arbitrary_bytes_in_a_stream_become_dead_letters(kind: Kind) {
    arbitrary_bytes_become_dead_letters(Queue::Stream, kind).await;
}

/// The nodes publish what was left in the outbox.
async fn arbitrary_bytes_are_not_published(kind: Kind) {
    let broker = rabbitmq::start().unwrap();
    arbitrary_bytes_become_dead_letters(Queue::RabbitMq(&broker), kind).await;
}

on_each_database!(
    @module on_postgres, Postgres,
    repeated_entries_do_no_harm,
    arbitrary_bytes_are_not_published,
    readable_dead_letters_are_recorded,
    dead_letter_that_cannot_be_recorded_is_kept
);
on_each_database!(
    @module on_mariadb, MariaDb,
    entries_that_no_consumer_can_read_are_recorded,
    arbitrary_bytes_in_a_stream_become_dead_letters,
    recorded_orders_survive_an_empty_redis,
    accepted_orders_survive_a_crash_of_redis,
    rebuild_keeps_what_cannot_be_stored_as_a_dead_letter,
    full_outbox_refuses_until_it_is_drained
);
