//! Two steps of one order at the same moment, over HTTP and in every tier: one of them is taken, and every payment ends.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use stampede_core::ports::OrderRow;
use stampede_core::{Clock as _, OrderStatus, SaleId, StepReason, SystemClock, Timestamp};
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};

use super::callbacks::{KEY, callback, start_with_provider, transactions_returned};
use super::deadline::create_sale;
use super::history::buy_recorded_with;
use super::payments::report;
use super::{System, TierKind, in_each_tier};
use crate::shop::{Buyer, Kind, Shop, TOKEN, read_only, verify};

/// How many orders are raced for at once. Each needs two connections.
const AT_ONCE: usize = 128;
/// The worker looks twice a second for orders that are due: the other step is taken within this time after the deadline.
const SPREAD_MS: u64 = 700;
/// The price of an order.
const CENTS: i64 = 100;
/// One of this many payments is made through the provider for tests, which refuses most orders that have ended before there is a payment. The
/// others are reported by a callback, so that a payment that loses the race exists and has to be returned.
const TEST_PROVIDER_EVERY: u64 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Race {
    PayAndExpire,
    CancelAndExpire,
    CancelAndPay,
    RefundAndRedeem,
    RedeemTwice,
}

/// A request for a step of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Pay,
    /// A payment is reported by a signed callback.
    Callback,
    Cancel,
    Refund,
    Redeem,
}

/// The answer to a request for a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Done,
    /// It was refused because of another step.
    Refused,
    /// The payment came too late and is returned.
    ToBeReturned,
}

/// What came of a race.
#[derive(Debug)]
struct Raced {
    order: String,
    /// The steps that were taken.
    done: Vec<Step>,
    /// Whether a payment came too late and is returned.
    is_returned: bool,
}

impl Race {
    const ALL: [Self; 5] =
        [Self::PayAndExpire, Self::CancelAndExpire, Self::CancelAndPay, Self::RefundAndRedeem, Self::RedeemTwice];

    /// The requests of the race with this number.
    fn steps(self, n: u64) -> &'static [Step] {
        let is_by_test_provider = n.is_multiple_of(TEST_PROVIDER_EVERY);
        match self {
            Self::PayAndExpire if is_by_test_provider => &[Step::Pay],
            Self::PayAndExpire => &[Step::Callback],
            Self::CancelAndExpire => &[Step::Cancel],
            Self::CancelAndPay if is_by_test_provider => &[Step::Cancel, Step::Pay],
            Self::CancelAndPay => &[Step::Cancel, Step::Callback],
            Self::RefundAndRedeem => &[Step::Refund, Step::Redeem],
            Self::RedeemTwice => &[Step::Redeem, Step::Redeem],
        }
    }

    const fn has_deadline(self) -> bool {
        matches!(self, Self::PayAndExpire | Self::CancelAndExpire)
    }

    const fn has_callbacks(self) -> bool {
        matches!(self, Self::PayAndExpire | Self::CancelAndPay)
    }

    /// Whether the order may have ended like this after these steps.
    fn may_end(self, done: &[Step], is_returned: bool, row: &OrderRow) -> bool {
        use OrderStatus::{Cancelled, Paid, Redeemed, Refunded};
        let status = row.order.status;
        match (self, done) {
            (Self::PayAndExpire, []) | (Self::CancelAndPay, [Step::Cancel]) if is_returned => status == Refunded,
            // The provider for tests returns a payment that comes too late at once.
            (Self::PayAndExpire, []) | (Self::CancelAndPay, [Step::Cancel]) => matches!(status, Cancelled | Refunded),
            _ if is_returned => false,
            // The cancellation of an order that has expired is answered as a repetition.
            (Self::CancelAndExpire, [Step::Cancel]) => {
                status == Cancelled && matches!(row.reason, Some(StepReason::Requested | StepReason::Expired))
            }
            (Self::PayAndExpire | Self::CancelAndPay, [Step::Pay | Step::Callback]) => status == Paid,
            (Self::RefundAndRedeem, [Step::Refund]) => status == Refunded,
            (Self::RefundAndRedeem | Self::RedeemTwice, [Step::Redeem]) => status == Redeemed,
            _ => false,
        }
    }
}

/// The transaction id of the payment that a callback reports for this order.
fn transaction(order: &str) -> String {
    format!("race-{order}")
}

async fn pay_by_callback(client: &mut Client, order: &str) -> Answer {
    let reply = report(client, KEY, 0, &callback(&transaction(order), order, CENTS)).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    match (reply.text("status").as_str(), reply.json()["reason"].as_str()) {
        ("paid", None) => Answer::Done,
        ("refund_due", Some("order_ended")) => Answer::ToBeReturned,
        other => panic!("{other:?}"),
    }
}

/// Requests this step of an order.
async fn request(client: &mut Client, step: Step, order: &str, buyer: &Buyer, code: &str) -> Answer {
    let own = |step: &str| (format!("/v1/orders/{order}/{step}"), buyer.token.as_str(), Value::Null);
    let (path, token, body) = match step {
        Step::Callback => return pay_by_callback(client, order).await,
        Step::Pay => own("pay"),
        Step::Cancel => own("cancel"),
        Step::Refund => (format!("/admin/v1/orders/{order}/refund"), TOKEN, Value::Null),
        Step::Redeem => (format!("/admin/v1/orders/{order}/redeem"), TOKEN, json!({ "code": code })),
    };
    let reply = client.post(&path, token, &body).await.unwrap();
    match (reply.status.as_u16(), reply.text("code").as_str()) {
        (200, _) => Answer::Done,
        (409, "illegal_step") => Answer::Refused,
        other => panic!("{step:?}: {other:?}"),
    }
}

/// Waits until a moment about the end of the order's time to pay.
async fn wait_for_deadline(client: &mut Client, order: &str, buyer: &Buyer, n: u64) {
    let seen = client.get(&format!("/v1/orders/{order}"), &buyer.token).await.unwrap().json();
    let pay_by: Timestamp = serde_json::from_value(seen["pay_by"].clone()).unwrap();
    let at = pay_by.plus(Duration::from_millis(n * 37 % SPREAD_MS));
    let left = at.ms() - SystemClock.now().ms();
    tokio::time::sleep(Duration::from_millis(u64::try_from(left).unwrap_or(0))).await;
}

/// Buys, and has both steps taken at the same moment, by two nodes if there are two.
async fn race_once(system: &System, race: Race, sale: SaleId, n: u64, buyer: &Buyer) -> Raced {
    let (mut one, mut other) = (system.shops[0].client().await, system.shops[system.shops.len() - 1].client().await);
    let order = buy_recorded_with(&mut one, sale, buyer).await;
    let mut code = String::new();
    let steps = race.steps(n);
    if steps.contains(&Step::Redeem) {
        assert_eq!(request(&mut one, Step::Pay, &order, buyer, "").await, Answer::Done);
        let path = format!("/v1/orders/{order}/redeem-code");
        code = one.post(&path, &buyer.token, &Value::Null).await.unwrap().text("code");
    }
    if race.has_deadline() {
        wait_for_deadline(&mut one, &order, buyer, n).await;
    }
    let answers = match *steps {
        [step] => vec![(step, request(&mut other, step, &order, buyer, &code).await)],
        [first, second] => {
            // Each is sent first in half of the races.
            let (first, second) = if n.is_multiple_of(2) { (first, second) } else { (second, first) };
            let answers = tokio::join!(
                request(&mut one, first, &order, buyer, &code),
                request(&mut other, second, &order, buyer, &code)
            );
            vec![(first, answers.0), (second, answers.1)]
        }
        ref steps => panic!("{steps:?}"),
    };
    let is_returned = answers.iter().any(|(_, answer)| *answer == Answer::ToBeReturned);
    let done = answers.into_iter().filter(|(_, answer)| *answer == Answer::Done).map(|(step, _)| step).collect();
    Raced { order, done, is_returned }
}

/// The orders of the sale in the ledger, once no further step is to be expected.
async fn rows_at_the_end(system: &System, sale: SaleId) -> HashMap<String, OrderRow> {
    let ledger = read_only(&system.storages[0]).await;
    let mut rows = Vec::new();
    until("every order and payment has ended", async || {
        rows = ledger.orders_in(sale, None, 100_000).await.unwrap();
        let is_open = |row: &OrderRow| matches!(row.order.status, OrderStatus::Unpaid | OrderStatus::Refunding);
        !rows.iter().any(is_open)
    })
    .await;
    ledger.close().await;
    rows.into_iter().map(|row| (row.order.id.to_string(), row)).collect()
}

async fn two_steps_at_once_have_one_winner(kind: Kind, tier: TierKind) {
    // The worker reads what is due, and locks it this much later: payments and cancellations come in between.
    let environment = vec![("STAMPEDE_FAILPOINTS", "expire.read=pause:100".to_owned())];
    let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (system, provider) = start_with_provider(kind, tier, environment, files.path()).await;
    let mut returned = Vec::new();
    // 10,000 of each race over all tiers and databases, not counting the payments through the provider for tests.
    let buyers = system.shops[0].log_in(0, count(1250, 24)).await;
    let shops: Vec<&Shop> = system.shops.iter().collect();
    for race in Race::ALL {
        let deadline = Duration::from_secs(if race.has_deadline() { 1 } else { 3600 });
        let sale = create_sale(&system, u32::try_from(buyers.len()).unwrap(), deadline).await;
        let races = (0..).zip(&buyers).map(|(n, buyer)| race_once(&system, race, sale, n, buyer));
        let raced: Vec<Raced> = stream::iter(races).buffer_unordered(AT_ONCE).collect().await;

        let rows = rows_at_the_end(&system, sale).await;
        let (mut live, mut ends) = (0, HashMap::<String, u32>::new());
        let (mut paid_by_callback, mut late) = (0, 0);
        for Raced { order, done, is_returned } in &raced {
            let row = &rows[order];
            assert!(race.may_end(done, *is_returned, row), "{race:?}: {done:?}, {is_returned} of {row:?}");
            paid_by_callback += usize::from(done.contains(&Step::Callback));
            if *is_returned {
                late += 1;
                returned.push(transaction(order));
            }
            live += usize::from(row.live);
            *ends.entry(format!("{:?}, {:?}", row.order.status, row.reason)).or_default() += 1;
        }
        eprintln!("{kind:?}, {tier:?}, {race:?}: {ends:?}; callbacks: {paid_by_callback} paid, {late} too late");
        assert!(
            race == Race::RedeemTwice || raced.len() < 1000 || ends.len() > 1,
            "{race:?} had the same winner every time: {ends:?}"
        );
        let enough = raced.len() / 100;
        assert!(
            !race.has_callbacks() || raced.len() < 1000 || (paid_by_callback >= enough && late >= enough),
            "{race:?}: {paid_by_callback} callbacks have paid, {late} came too late"
        );
        assert_eq!(rows.len(), buyers.len());
        assert_eq!(verify(&Recorder::default(), &system.storages[0], &shops, sale).await, live, "{race:?}");
        let ledger = read_only(&system.storages[0]).await;
        let row = ledger.sale(sale).await.unwrap().unwrap();
        ledger.close().await;
        let stock = i64::try_from(rows.len() - live).unwrap();
        assert_eq!((row.sold as usize, row.released), (live, stock), "{race:?}: stock is returned once");
    }
    // Every payment that came too late was returned, once, and no other.
    let mut asked = transactions_returned(&provider);
    asked.sort_unstable();
    returned.sort_unstable();
    assert_eq!(asked, returned);
}

in_each_tier!(all: two_steps_at_once_have_one_winner);
