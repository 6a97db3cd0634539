//! Every step of every order is delivered to a receiver of the operator, at least once, and those of an order in sequence.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde_json::{Value, json};
use sha2::Sha256;
use stampede_core::{Clock as _, OrderStatus, SaleId, SystemClock};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{count, until};
use tokio::net::{TcpListener, TcpStream};

use super::deadline::create_sale;
use super::history::buy_recorded;
use super::{System, TierKind, in_each_tier};
use crate::receiver::{Message, Receiver};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, read_only, temporary_storage, verify};

const SECRET: &str = "a-secret-of-the-receiver-5d0c81f7";
/// How long events may take to arrive: the lock of a node that was killed expires after half a minute, and pauses grow to a minute.
const ARRIVAL: Duration = Duration::from_secs(150);

/// The settings with which events go to this receiver.
fn events_to(receiver: &Receiver) -> Vec<(&'static str, String)> {
    events_to_address(receiver.address)
}

fn events_to_address(address: SocketAddr) -> Vec<(&'static str, String)> {
    vec![
        ("STAMPEDE__EVENTS__WEBHOOK_URL", format!("http://{address}/events")),
        ("STAMPEDE__EVENTS__RETRY_PAUSE_MS", "10".to_owned()),
        ("STAMPEDE_EVENTS_SECRET", SECRET.to_owned()),
    ]
}

fn is_signed(message: &Message) -> bool {
    let (seconds, signature) = message.signature.split_once(",v1=").unwrap();
    let seconds = seconds.strip_prefix("t=").unwrap();
    let mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).unwrap();
    let mac = mac.chain_update(format!("{seconds}.{}", message.body).as_bytes()).finalize().into_bytes();
    let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    hex == signature
}

/// The events that were accepted, by their ids. Checks that no event was sent before those before it of the same order were accepted, or with
/// them in one message, and that a repeated event is the same. The demonstration data has orders of other sales.
fn accepted(receiver: &Receiver, sales: &[SaleId]) -> BTreeMap<String, Value> {
    let sales: Vec<Value> = sales.iter().map(|sale| json!(sale)).collect();
    all_accepted(receiver).into_iter().filter(|(_, event)| sales.contains(&event["sale_id"])).collect()
}

fn all_accepted(receiver: &Receiver) -> BTreeMap<String, Value> {
    let mut accepted: BTreeMap<String, Value> = BTreeMap::new();
    // The highest number of each order that was accepted, with the status.
    let mut reached: HashMap<String, (u64, String)> = HashMap::new();
    for message in receiver.received() {
        assert!(is_signed(&message), "{message:?}");
        let mut here = reached.clone();
        let body = message.json();
        for event in body["events"].as_array().unwrap() {
            let text = |member: &str| event[member].as_str().unwrap().to_owned();
            let (id, order, from, to) = (text("id"), text("order_id"), text("from"), text("to"));
            let number = event["number"].as_u64().unwrap();
            let (last, status) = here.get(&order).cloned().unwrap_or((0, "pending".to_owned()));
            assert!(number <= last || from == status, "{event} was sent after the order was {status}");
            if number > last {
                here.insert(order, (number, to));
            }
            if (200..300).contains(&message.status) {
                let known = accepted.insert(id, event.clone());
                assert!(known.is_none_or(|known| known == *event), "{event}");
            }
        }
        if (200..300).contains(&message.status) {
            reached = here;
        }
    }
    accepted
}

/// Every step of every order in the ledger as an event, by its id. `None` while orders are about to take further steps.
async fn recorded(system: &System, sale: SaleId, expiring: SaleId) -> Option<BTreeMap<String, Value>> {
    let ledger = read_only(&system.storages[0]).await;
    let (mut events, mut is_settled) = (BTreeMap::new(), true);
    for of in [sale, expiring] {
        for row in ledger.orders_in(of, None, 100_000).await.unwrap() {
            let (order, user, status) = (row.order.id, row.order.user, row.order.status);
            is_settled &= status != OrderStatus::Refunding && (of == sale || status != OrderStatus::Unpaid);
            for step in ledger.order_history(order).await.unwrap() {
                let id = format!("{order}-{}", step.to.as_str());
                let event = json!({
                    "id": id, "order_id": order, "sale_id": of, "user_id": user, "from": step.from, "to": step.to,
                    "at": step.at, "reason": step.reason, "by": step.by, "number": step.to.number(),
                });
                events.insert(id, event);
            }
        }
    }
    ledger.close().await;
    is_settled.then_some(events)
}

async fn pay(shop: &Shop, order: &str, buyer: &Buyer) {
    let path = format!("/v1/orders/{order}/pay");
    let paid = shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
    assert_eq!(paid.text("status"), "paid", "{paid:?}");
}

async fn cancel(shop: &Shop, order: &str, buyer: &Buyer) {
    let path = format!("/v1/orders/{order}/cancel");
    let cancelled = shop.client().await.post(&path, &buyer.token, &Value::Null).await.unwrap();
    assert_eq!(cancelled.text("status"), "cancelled", "{cancelled:?}");
}

/// Each buys from both sales. Orders of the second expire; those of the first are paid, cancelled, refunded, or left unpaid.
async fn buy_and_go_on(system: &System, sale: SaleId, expiring: SaleId, buyers: &[Buyer]) {
    for (n, buyer) in buyers.iter().enumerate() {
        let shop = &system.shops[n % system.shops.len()];
        buy_recorded(shop, expiring, buyer).await;
        let order = buy_recorded(shop, sale, buyer).await;
        match n % 4 {
            0 => pay(shop, &order, buyer).await,
            1 => cancel(shop, &order, buyer).await,
            2 => {
                pay(shop, &order, buyer).await;
                let refund = shop.admin(&format!("orders/{order}/refund"), &Value::Null).await;
                assert_eq!(refund.status, 200, "{refund:?}");
            }
            _ => {}
        }
    }
}

/// Kills a node and starts it again.
async fn restart(system: &mut System, n: usize, sales: [SaleId; 2]) {
    system.shops[n].process.kill().unwrap();
    system.shops[n] = system.run(n);
    for sale in sales {
        system.wait_for_sale(sale).await;
    }
}

/// Waits until the receiver has accepted every step in the ledger.
async fn all_arrive(system: &System, receiver: &Receiver, sale: SaleId, expiring: SaleId) {
    let started = Instant::now();
    loop {
        let (expected, arrived) = (recorded(system, sale, expiring).await, accepted(receiver, &[sale, expiring]));
        if expected.as_ref() == Some(&arrived) {
            return;
        }
        assert!(started.elapsed() < ARRIVAL, "{arrived:#?} is not {expected:#?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The receiver is away for a while, and nodes are killed meanwhile and when it is back.
async fn every_step_arrives_in_sequence(kind: Kind, tier: TierKind) {
    let nodes = if tier == TierKind::Solo { 1 } else { 2 };
    let receiver = Receiver::start(204).await;
    let mut system = System::start_with(kind, tier, nodes, events_to(&receiver));
    let buyers = system.shops[0].log_in(0, count(120, 12)).await;
    let sale = create_sale(&system, 1000, Duration::from_secs(3600)).await;
    let expiring = create_sale(&system, 1000, Duration::from_secs(1)).await;
    let parts: Vec<&[Buyer]> = buyers.chunks(buyers.len() / 3).collect();
    buy_and_go_on(&system, sale, expiring, parts[0]).await;
    until("the first events arrive", async || !accepted(&receiver, &[sale, expiring]).is_empty()).await;

    receiver.answer_with(503);
    let (away_at, away_for) = (Instant::now(), Duration::from_secs(count(60, 2)));
    buy_and_go_on(&system, sale, expiring, parts[1]).await;
    let is_refused = async || receiver.received().iter().any(|message| message.status == 503);
    until("events are sent while the receiver is away", is_refused).await;
    restart(&mut system, nodes - 1, [sale, expiring]).await;
    buy_and_go_on(&system, sale, expiring, parts[2]).await;
    tokio::time::sleep(away_for.saturating_sub(away_at.elapsed())).await;
    let before = accepted(&receiver, &[sale, expiring]).len();
    receiver.answer_with(204);
    restart(&mut system, 0, [sale, expiring]).await;

    all_arrive(&system, &receiver, sale, expiring).await;
    let arrived = accepted(&receiver, &[sale, expiring]).len();
    assert!(arrived > before, "nothing was accepted while the receiver was away");
    until("the outbox is empty", async || system.shops[0].metric("stampede_events_waiting").await == 0.0).await;
    let shops: Vec<&Shop> = system.shops.iter().collect();
    // Half of the orders are paid or unpaid, the others were cancelled or refunded.
    for (of, live) in [(sale, buyers.len() / 2), (expiring, 0)] {
        assert_eq!(verify(&Recorder::default(), &system.storages[0], &shops, of).await, live);
    }
}

in_each_tier!(all: every_step_arrives_in_sequence);

/// Nothing listens on the port of the receiver; then something accepts connections and never answers; then the receiver is there. Orders are
/// bought, paid, cancelled, refunded and expire meanwhile, faster than a message times out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn absent_and_hanging_receivers_hold_up_nothing() {
    /// A message times out after ten.
    const LONGEST_WORK: Duration = Duration::from_secs(8);
    // The port is free from here on.
    let address = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap();
    let system = System::start_with(Kind::Sqlite, TierKind::Solo, 1, events_to_address(address));
    let shop = &system.shops[0];
    let buyers = shop.log_in(0, 8).await;
    let sale = create_sale(&system, 100, Duration::from_secs(3600)).await;
    let expiring = create_sale(&system, 100, Duration::from_secs(1)).await;
    let work = async |buyers: &[Buyer]| {
        let started = Instant::now();
        buy_and_go_on(&system, sale, expiring, buyers).await;
        until("orders expire and are refunded", async || recorded(&system, sale, expiring).await.is_some()).await;
        assert!(started.elapsed() < LONGEST_WORK, "{:?}", started.elapsed());
    };
    work(&buyers[..4]).await;
    let hanging = TcpListener::bind(address).await.unwrap();
    let mut connection: Option<TcpStream> = None;
    until("a message is sent", async || {
        let accepting = tokio::time::timeout(Duration::from_millis(100), hanging.accept()).await;
        connection = accepting.ok().map(|accepted| accepted.unwrap().0);
        connection.is_some()
    })
    .await;
    work(&buyers[4..]).await;
    until("what waits is counted", async || shop.metric("stampede_events_waiting").await > 0.0).await;
    assert!(shop.has_metric("stampede_events_sent_total 0\n").await, "nothing was accepted");
    drop(hanging);
    let receiver = Receiver::start_at(address, 204).await;
    all_arrive(&system, &receiver, sale, expiring).await;
    assert_eq!(listed(shop).await["failed"], json!([]), "nothing counts as rejected");
    drop(connection);
}

/// Runs `stampede events` and returns whether it succeeded and what it printed.
fn events_command(shop: &Shop, arguments: &[&str]) -> (bool, String) {
    let target = format!("http://{}", shop.address);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.arg("events").args(arguments).args(["--target", &target]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

async fn listed(shop: &Shop) -> Value {
    shop.client().await.get("/admin/v1/events", TOKEN).await.unwrap().json()
}

/// The receiver does not accept the events of one order: those of others arrive, and an operator has them sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_event_holds_up_no_other_order() {
    let (storage, receiver) = (temporary_storage(), Receiver::start(503).await);
    let mut command = command(&storage);
    command.envs(events_to(&receiver));
    let shop = Shop::run(command);
    let sale = shop.create_sale(10).await;
    let buyers = shop.log_in(0, 4).await;
    let mut orders = Vec::new();
    for buyer in &buyers[..3] {
        orders.push(buy_recorded(&shop, sale, buyer).await);
    }
    cancel(&shop, &orders[1], &buyers[1]).await;
    receiver.reject(Some(&orders[1]));
    receiver.answer_with(200);
    let has = |order: &str, to: &str| accepted(&receiver, &[sale]).contains_key(&format!("{order}-{to}"));
    until("the others arrive", async || has(&orders[0], "unpaid") && has(&orders[2], "unpaid")).await;
    pay(&shop, &orders[0], &buyers[0]).await;
    until("later steps of others arrive", async || has(&orders[0], "paid")).await;

    let is_listed = async || listed(&shop).await["failed"].as_array().unwrap().len() == 2;
    until("the events of the order are set aside", is_listed).await;
    assert!(shop.has_metric("stampede_alerts_total{alert=\"event_rejected\"} 1\n").await);
    let failed = listed(&shop).await;
    let of = |to: &str| {
        let found = failed["failed"].as_array().unwrap().iter().find(|event| event["to"] == to);
        found.unwrap_or_else(|| panic!("{failed}")).clone()
    };
    let (unpaid, cancelled) = (of("unpaid"), of("cancelled"));
    assert_eq!((&unpaid["order_id"], &unpaid["tries"]), (&json!(orders[1]), &json!(10)), "{failed}");
    assert!(unpaid["error"].as_str().unwrap().contains("422"), "{failed}");
    assert_eq!((&cancelled["tries"], &failed["waiting"]), (&json!(0), &json!(2)), "{failed}");
    let (done, text) = events_command(&shop, &["list"]);
    assert!(done && text.contains(&orders[1]) && text.contains("2 event(s) set aside"), "{text}");
    let sent = receiver.received().len();
    buy_recorded(&shop, sale, &buyers[3]).await;
    until("a later order arrives", async || accepted(&receiver, &[sale]).len() == 4).await;
    assert_eq!(receiver.received().len(), sent + 1, "what is set aside is not sent");

    receiver.reject(None);
    let (done, text) = events_command(&shop, &["retry", &orders[0]]);
    assert!(done && text.contains("retried") && text.contains(" 0"), "{text}");
    let (done, text) = events_command(&shop, &["retry", "--json"]);
    assert_eq!((done, text.parse::<Value>().unwrap()), (true, json!({ "retried": 2 })), "{text}");
    until("they arrive", async || has(&orders[1], "unpaid") && has(&orders[1], "cancelled")).await;
    let empty = json!({ "waiting": 0, "failed": [] });
    until("the outbox is empty", async || listed(&shop).await == empty).await;
    let again = shop.admin("events/retry", &json!({ "order_id": orders[1] })).await;
    assert_eq!((again.status.as_u16(), again.json()), (200, json!({ "retried": 0 })));
    let others = all_accepted(&receiver).len() - accepted(&receiver, &[sale]).len();
    assert!(shop.has_metric(&format!("stampede_events_sent_total {}\n", 6 + others)).await);
    let log = shop.client().await.get("/admin/v1/audit?limit=100", TOKEN).await.unwrap().json();
    let log = log["actions"].as_array().unwrap().iter().filter(|action| action["action"] == "retry_events");
    let outcomes: Vec<_> = log.map(|action| (&action["target"], &action["outcome"])).collect();
    let one = |order: &str| json!(format!("order {order}"));
    let expected = json!([[one(&orders[1]), "unchanged"], ["events", "done"], [one(&orders[0]), "unchanged"]]);
    assert_eq!(json!(outcomes), expected);
}

/// A proxy in front of the receiver refuses every message: nothing counts as rejected, and everything arrives later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_a_proxy_are_an_outage() {
    let (storage, receiver) = (temporary_storage(), Receiver::start(401).await);
    let mut command = command(&storage);
    command.envs(events_to(&receiver));
    let shop = Shop::run(command);
    let sale = shop.create_sale(10).await;
    let buyers = shop.log_in(0, 3).await;
    for buyer in &buyers {
        buy_recorded(&shop, sale, buyer).await;
    }
    for status in [401, 403, 404, 405] {
        receiver.answer_with(status);
        let is_answered = async || receiver.received().iter().any(|message| message.status == status);
        until("a message is answered with this status", is_answered).await;
    }
    let ledger = read_only(&storage).await;
    let entries = ledger.due_events(SystemClock.now().plus(Duration::from_secs(3600)), 1000).await.unwrap();
    ledger.close().await;
    assert!(!entries.is_empty() && entries.iter().all(|entry| entry.tries == 0), "{entries:?}");
    receiver.answer_with(204);
    until("everything arrives", async || accepted(&receiver, &[sale]).len() == buyers.len()).await;
    assert_eq!(listed(&shop).await["failed"], json!([]));
}

/// A process without the setting would write no events of what it does, so it does not start beside one that has it, or the reverse.
async fn processes_with_and_without_a_receiver_exclude_each_other(kind: Kind) {
    let receiver = Receiver::start(204).await;
    let server = kind.server().unwrap();
    let url = kind.create_database(server, server.port());
    let storages = [Storage::with(Some(url.clone())), Storage::with(Some(url))];
    let serve = |n: usize, has_receiver: bool| {
        let mut command = command(&storages[n]);
        if has_receiver {
            command.envs(events_to(&receiver));
        }
        command
    };
    for has_receiver in [true, false] {
        let shop = Shop::run(serve(0, has_receiver));
        let refused = tokio::process::Command::from(serve(1, !has_receiver)).kill_on_drop(true).output();
        let refused = tokio::time::timeout(Duration::from_secs(30), refused).await.expect("it does not start").unwrap();
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && text.contains("events.webhook_url"), "{text}");
        let other = Shop::run(serve(1, has_receiver));
        for shop in [shop, other] {
            assert!(shop.stop().success());
        }
    }
}

on_each_database!(servers: processes_with_and_without_a_receiver_exclude_each_other);

/// Without the setting, nothing is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_events_are_kept_without_a_receiver() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let order = buy_recorded(&shop, sale, &buyer).await;
    cancel(&shop, &order, &buyer).await;
    assert_eq!(listed(&shop).await, json!({ "waiting": 0, "failed": [] }));
    assert!(!shop.has_metric("stampede_events_").await);
}
