//! Payments for orders that fall due together: an order that is being paid holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, count, until};

use super::TierKind;
use super::callbacks::{KEY, callback, start_with_provider};
use super::deadline::create_sale;
use super::due_together::{DEADLINE, record};
use super::payments::report;
use crate::shop::{Kind, read_only, verify};

const PAYERS: u64 = 16;
/// How long the expiry may take.
const LONGEST_EXPIRY: Duration = Duration::from_secs(20);
/// How long it may take to return the payments of a wrong amount, of which there are tens of thousands with full counts.
const LONGEST_RETURN: Duration = Duration::from_secs(600);

/// Reports payments of a wrong amount for these orders in turns, until all have expired: the row of one of them is locked at any time. Now and
/// then pays one.
async fn report_payments(mut client: Client, mut orders: Vec<u64>, answered: Arc<AtomicU64>) -> u64 {
    let mut paid = 0;
    for n in 0_u64.. {
        let mut unpaid = Vec::new();
        for order in orders {
            let cents = if n == 3 && order.is_multiple_of(10) { 100 } else { 99 };
            let payment = callback(&format!("{order}-{n}"), &order.to_string(), cents);
            let reply = report(&mut client, KEY, 0, &payment).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            answered.fetch_add(1, Ordering::Relaxed);
            paid += u64::from(reply.text("status") == "paid");
            if reply.json()["reason"] == "wrong_amount" {
                unpaid.push(order);
            }
        }
        if unpaid.is_empty() {
            break;
        }
        orders = unpaid;
    }
    paid
}

/// Payments of orders that are due are under way all the time: the other orders of the sale expire meanwhile.
async fn payments_in_flight_hold_up_no_expiry(kind: Kind) {
    let orders = count(50_000, 4000);
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("hold");
    let held = file.with_extension("reached");
    let hold = vec![("STAMPEDE_FAILPOINTS", format!("expire.read=hold:{}", file.display()))];
    let (system, _provider) = start_with_provider(kind, TierKind::Solo, hold, folder.path()).await;
    let (shop, storage) = (&system.shops[0], &system.storages[0]);
    let sale = create_sale(&system, u32::try_from(orders).unwrap(), DEADLINE).await;
    std::fs::write(&file, "").unwrap();
    record(storage, sale, i64::try_from(orders).unwrap()).await;
    until("the worker has read what is due", async || held.exists()).await;

    let answered = Arc::new(AtomicU64::new(0));
    let payers: Vec<_> = (0..PAYERS)
        .map(|n| {
            // Spread over all orders, so that every transaction of the worker finds some that are locked.
            let of_payer = (n * orders / PAYERS + 1..=(n + 1) * orders / PAYERS).step_by(37).collect();
            let (address, answered) = (shop.address, answered.clone());
            tokio::spawn(
                async move { report_payments(Client::connect(address).await.unwrap(), of_payer, answered).await },
            )
        })
        .collect();
    until("payments are reported", async || answered.load(Ordering::Relaxed) > 4 * PAYERS).await;
    let started = Instant::now();
    std::fs::remove_file(&held).unwrap();
    let ledger = read_only(storage).await;
    // The demonstration data has orders that fall due later.
    until("nothing is due", async || {
        let now = ledger.now().await.unwrap();
        ledger.next_payment_due().await.unwrap().is_none_or(|due| due > now)
    })
    .await;
    let expiry = started.elapsed();
    let mut paid = 0;
    for payer in payers {
        paid += payer.await.unwrap();
    }
    eprintln!("{kind:?}: {orders} orders expired in {expiry:?} while {paid} were paid");
    assert!(expiry < LONGEST_EXPIRY, "{expiry:?}");
    assert!(!shop.has_metric("orders_not_expired").await, "an alert was raised");
    let row = ledger.sale(sale).await.unwrap().unwrap();
    let expired = i64::try_from(orders - paid).unwrap();
    assert_eq!((u64::from(row.sold), row.released), (paid, expired), "the others are returned once each");

    let ended = Instant::now();
    while !ledger.open_refunds(1).await.unwrap().is_empty() {
        assert!(ended.elapsed() < LONGEST_RETURN, "payments are not returned");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    ledger.close().await;
    eprintln!("{kind:?}: the payments were returned {:?} later", ended.elapsed());
    // Without the history: no user has requested the orders that were recorded directly.
    assert_eq!(verify(&Recorder::default(), storage, &[shop], sale).await as u64, paid);
}

on_each_database!(servers: payments_in_flight_hold_up_no_expiry);
