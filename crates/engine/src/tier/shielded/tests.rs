//! The bound of sales, many buyers, and what becomes of the flag when a subscription begins or ends.

use std::pin::pin;

use futures_util::FutureExt as _;
use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Gate as _, GateRecord, LoadedSale};
use stampede_core::{Epoch, Money, OrderId, Sale, SalePhase, SaleStatus, Timestamp, VoucherId, Window};
use stampede_redis::{Client, Servers};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, Server, redis, until};

use super::buyers::MAX_EXACT;
use super::*;

const GENERATION: Generation = Generation { epoch: Epoch(1), number: 0 };
/// Longer than a test takes.
const EXPIRY: Duration = Duration::from_secs(3600);
/// The end of every sale: in 2100.
const END_MS: i64 = 4_102_444_800_000;

fn id(n: usize) -> SaleId {
    SaleId::new(n as i64).unwrap()
}

fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

fn gate(url: String) -> Arc<RedisGate> {
    let timeout = Duration::from_secs(5);
    let client = Arc::new(Client::new(Servers::Single(url), timeout, timeout).unwrap());
    let record = GateRecord { ledger_id: "test".to_owned(), incarnation: 1, replication_id: String::new() };
    Arc::new(RedisGate::new(client, &record, 1))
}

/// A gate that is never called.
fn unused_gate() -> Arc<RedisGate> {
    gate("redis://127.0.0.1:1/".to_owned())
}

fn shield(gate: &Arc<RedisGate>) -> Arc<Shield> {
    Shield::new(ShieldConfig { expiry: EXPIRY, max_buyers: 2 }, gate.clone())
}

/// What the shield answers to a user without an order, for the first sale.
fn refusal(shield: &Arc<Shield>) -> Option<Refusal> {
    shield.refusal(id(1), user(2))
}

fn sale(n: usize) -> Sale {
    let price = Money::from_cents(100).unwrap();
    Sale {
        id: id(n),
        voucher: VoucherId::new(n as i64).unwrap(),
        title: String::new(),
        price,
        worth: price,
        status: SaleStatus::OnSale,
        window: Window { begin: Timestamp::from_ms(0), end: Timestamp::from_ms(END_MS) },
        total: 1,
        cap: 1,
        sold: 0,
        epoch: Epoch(1),
        phase: SalePhase::Open,
        version: 1,
        released: 0,
        payment_deadline_ms: 0,
        buy_again: true,
    }
}

#[test]
fn sales_that_have_left_the_gate_make_room_and_others_do_not() {
    let gate = unused_gate();
    let shield = shield(&gate);
    // The first one is not in the gate.
    for n in 2..=MAX_SALES + 2 {
        gate.adopt(&sale(n));
    }
    for n in 1..=MAX_SALES {
        shield.note(id(n), GENERATION);
    }
    assert_eq!(shield.sales.read().len(), MAX_SALES);
    shield.note(id(MAX_SALES + 1), GENERATION);
    assert!(shield.sales.read().contains_key(&id(MAX_SALES + 1)), "the first sale has made room");
    assert!(!shield.sales.read().contains_key(&id(1)));
    shield.note(id(MAX_SALES + 2), GENERATION);
    assert!(!shield.sales.read().contains_key(&id(MAX_SALES + 2)), "requests for this one go to the gate");
    assert_eq!(shield.sales.read().len(), MAX_SALES);
}

/// A search looks at all sales under a lock that every request needs.
#[tokio::test]
async fn room_is_searched_for_at_most_once_a_second() {
    let gate = unused_gate();
    let shield = shield(&gate);
    for n in 1..=MAX_SALES {
        gate.adopt(&sale(n));
        shield.note(id(n), GENERATION);
    }
    let other = id(MAX_SALES + 1);
    assert!(shield.state(other).is_none(), "there is no room");
    let searched_at = *shield.searched_at.lock();
    // No sale is in the gate any more.
    gate.set_incarnation(&GateRecord { ledger_id: "test".to_owned(), incarnation: 2, replication_id: String::new() });
    let after = until("there is room", async || shield.state(other).is_some()).await;
    assert_ne!(*shield.searched_at.lock(), searched_at);
    assert!(after > SEARCH_INTERVAL / 2, "searched again after {after:?}");
}

/// As if the gate had answered that the first sale is sold out, to others than user 2.
fn set_sold_out(shield: &Shield) {
    let state = shield.state(id(1)).unwrap();
    let mut state = state.lock();
    state.note(GENERATION);
    state.set_refusing(GENERATION, Refusal::SoldOut, Instant::now() + EXPIRY);
    let no_buyers = Buyers::with_capacity(shield.capacity.reserve(0).unwrap());
    state.set_buyers(GENERATION, Refusal::SoldOut, 0, no_buyers);
}

#[test]
fn every_subscription_clears_the_flag_and_the_end_of_one_does_not() {
    let shield = shield(&unused_gate());
    for _ in 0..2 {
        set_sold_out(&shield);
        assert_eq!(refusal(&shield), Some(Refusal::SoldOut));
        shield.subscribed();
        assert_eq!(refusal(&shield), None, "a message may have been missed before");
        set_sold_out(&shield);
        shield.disconnected();
        assert_eq!(refusal(&shield), Some(Refusal::SoldOut), "until the answer expires");
    }
    shield.subscribed();
    assert_eq!(refusal(&shield), None);
}

#[test]
fn answers_count_if_their_call_began_under_the_subscription_or_there_is_none() {
    let shield = shield(&unused_gate());
    let early = Instant::now();
    assert!(shield.counts(early), "without messages the expiry alone limits an answer");
    shield.subscribed();
    let subscribed_at = shield.subscribed_at.lock().unwrap();
    assert!(shield.counts(subscribed_at));
    assert!(!shield.counts(subscribed_at.checked_sub(Duration::from_nanos(1)).unwrap()));
    shield.disconnected();
    assert!(shield.counts(early));
    shield.subscribed();
    assert!(!shield.counts(subscribed_at), "that was an earlier subscription");
}

/// The shield of a gate that has sold one of these items of the first sale, to user 1.
async fn one_sold_of(cap: u32) -> (Server, Proxy, Arc<Shield>) {
    let server = redis::start().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let gate = gate(redis::url(proxy.address().port()));
    gate.load_scripts(1).await.unwrap();
    let marks = vec![(user(1), OrderId::new(1).unwrap())];
    gate.open(LoadedSale { sale: Sale { total: cap, cap, ..sale(1) }, marks, ended: Vec::new() }).await.unwrap();
    (server, proxy, shield(&gate))
}

/// The shield of a gate that has sold the first sale to user 1.
async fn sold_out() -> (Server, Proxy, Arc<Shield>) {
    one_sold_of(1).await
}

/// The gate is asked first whether it refuses users without an order: in a set that was read before, later buyers would be missing.
#[tokio::test]
async fn buyers_are_read_only_while_the_gate_refuses_others() {
    let (server, _proxy, shield) = one_sold_of(2).await;
    let state = shield.state(id(1)).unwrap();
    shield.read_buyers_now(id(1), &state).await.unwrap();
    let commands = redis::ask(server.port(), &["info", "commandstats"]).unwrap();
    assert!(commands.contains("cmdstat_evalsha") && !commands.contains("cmdstat_hscan"), "{commands}");
    assert!(!state.lock().has_buyers_of(GENERATION, Refusal::SoldOut));
    assert_eq!(shield.capacity.used(), 0);
    assert_eq!(shield.refusal(id(1), user(3)), None);

    let last = AdmitRequest { user: user(2), order: OrderId::new(2).unwrap() };
    let decisions = shield.gate.admit(id(1), &[last], Timestamp::from_ms(1)).await.unwrap().unwrap();
    assert_eq!(decisions.len(), 1);
    shield.read_buyers_now(id(1), &state).await.unwrap();
    assert_eq!([1, 2, 3].map(|n| shield.refusal(id(1), user(n))), [None, None, Some(Refusal::SoldOut)]);
}

/// The node subscribes again while the gate is asked: stock may have come back after the gate's answer and before the subscription.
#[tokio::test]
async fn answer_to_a_call_from_before_the_subscription_sets_no_flag() {
    let (_server, proxy, shield) = sold_out().await;
    let state = shield.state(id(1)).unwrap();
    shield.read_buyers_now(id(1), &state).await.unwrap();
    assert_eq!(refusal(&shield), Some(Refusal::SoldOut));
    assert_eq!(shield.refusal(id(1), user(1)), None, "an owner goes to the gate");
    shield.subscribed();

    proxy.set(Fault::Hang);
    let mut asking = pin!(shield.ask(id(1), &state));
    assert!(asking.as_mut().now_or_never().is_none(), "the call is under way");
    shield.subscribed();
    proxy.set(Fault::None);
    let (generation, reason, _) = asking.await.unwrap().expect("the gate refuses users without an order");
    assert_eq!((generation, reason), (GENERATION, Refusal::SoldOut));
    assert_eq!(refusal(&shield), None);

    shield.ask(id(1), &state).await.unwrap();
    assert_eq!(refusal(&shield), Some(Refusal::SoldOut), "this call began later");
}

/// The gate may have answered at any time since its call began, so the answer expires that long after the begin.
#[tokio::test]
async fn answer_expires_counting_from_the_begin_of_its_call() {
    let (_server, proxy, shield) = sold_out().await;
    let state = shield.state(id(1)).unwrap();
    shield.read_buyers_now(id(1), &state).await.unwrap();
    proxy.set(Fault::Hang);
    let before = Instant::now();
    let mut asking = pin!(shield.ask(id(1), &state));
    assert!(asking.as_mut().now_or_never().is_none(), "the call is under way");
    let begun = Instant::now();
    proxy.set(Fault::None);
    asking.await.unwrap().expect("the gate refuses users without an order");
    assert!(begun < Instant::now());
    let refusal = |now: Instant| state.lock().refusal(user(2), now);
    let last = (before + EXPIRY).checked_sub(Duration::from_nanos(1)).unwrap();
    assert_eq!(refusal(last), Some(Refusal::SoldOut), "the second answer counts");
    assert_eq!(refusal(begun + EXPIRY), None);
}

/// A sale with so many owners that the node keeps a filter of them, which it reads from the gate in many pages.
#[tokio::test]
async fn every_owner_of_a_large_sale_goes_to_the_gate_and_nearly_all_others_are_refused() {
    const STRANGERS: i64 = 100_000;
    let owners = u32::try_from(MAX_EXACT + 1).unwrap();
    let server = redis::start().unwrap();
    let gate = gate(redis::url(server.port()));
    gate.load_scripts(1).await.unwrap();
    let marks = (1..=i64::from(owners)).map(|n| (user(n), OrderId::new(n).unwrap())).collect();
    gate.open(LoadedSale { sale: Sale { total: owners, cap: owners, ..sale(1) }, marks, ended: Vec::new() })
        .await
        .unwrap();

    let shield = Shield::new(ShieldConfig { expiry: EXPIRY, max_buyers: owners }, gate.clone());
    let state = shield.state(id(1)).unwrap();
    shield.read_buyers_now(id(1), &state).await.unwrap();
    let goes_to_the_gate = |n: i64| shield.refusal(id(1), user(n)).is_none();
    let owners_refused = (1..=i64::from(owners)).filter(|n| !goes_to_the_gate(*n)).count();
    assert_eq!(owners_refused, 0);
    // One in a thousand. With a set of all owners there would be none.
    let mistaken = (1..=STRANGERS).filter(|n| goes_to_the_gate(1_000_000_000 + n)).count();
    assert!((1..500).contains(&mistaken), "{mistaken} of {STRANGERS} users without an order go to the gate");

    // One owner more than there is room for: all requests go to the gate.
    let shield = Shield::new(ShieldConfig { expiry: EXPIRY, max_buyers: owners - 1 }, gate);
    let state = shield.state(id(1)).unwrap();
    shield.read_buyers_now(id(1), &state).await.unwrap();
    assert_eq!(shield.refusal(id(1), user(i64::from(owners) + 1)), None);
    assert_eq!(shield.capacity.used(), 0);
}
