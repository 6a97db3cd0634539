//! Concurrent buyers while the server is killed or aborts.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::failpoint;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::process::was_killed_by;
use stampede_testkit::{Client, count};

use crate::shop::{Buyer, Kind, Shop, Storage, command, verify};

const STOCK: u32 = 40;
const BUYERS: u64 = 60;
const SIGKILL: i32 = 9;
const SIGABRT: i32 = 6;

#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// SIGKILL this long after the buyers have started.
    KillAfter(Duration),
    /// Abort the n-th time that this failpoint is reached.
    AbortAt(&'static str, u64),
}

impl Fault {
    pub fn random_kill(rng: &mut StdRng) -> Self {
        Self::KillAfter(Duration::from_micros(rng.random_range(0..60_000)))
    }

    pub fn random_abort(rng: &mut StdRng, failpoint: &'static str) -> Self {
        // There are far fewer batches than attempts.
        let most = if failpoint.starts_with("record") { 6 } else { 40 };
        Self::AbortAt(failpoint, rng.random_range(1..most))
    }
}

/// The server dies while buyers try, is started again, and the buyers continue. Returns `false` if the server survived, so that the round
/// does not count.
pub async fn round(storage: &Storage, buyers: &[Buyer], fault: Fault, rng: &mut StdRng) -> bool {
    let mut command = command(storage);
    if let Fault::AbortAt(failpoint, hit) = fault {
        command.env("STAMPEDE_FAILPOINTS", format!("{failpoint}=abort@{hit}"));
    }
    let mut shop = Shop::run(command);
    let sale = shop.create_sale(STOCK).await;
    let history = Arc::new(Recorder::default());

    let tasks: Vec<_> = buyers
        .iter()
        .map(|buyer| {
            let (history, buyer, address) = (history.clone(), buyer.clone(), shop.address);
            let delay = Duration::from_micros(rng.random_range(0..40_000));
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                let Ok(mut client) = Client::connect(address).await else { return };
                // A buyer tries until the server is down, at most three times.
                for _ in 0..3 {
                    if history.buy(&mut client, sale, &buyer).await.response == Response::Unknown {
                        return;
                    }
                }
            })
        })
        .collect();
    if let Fault::KillAfter(span) = fault {
        tokio::time::sleep(span).await;
        assert!(was_killed_by(shop.process.kill().unwrap(), SIGKILL));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let died = match (fault, shop.process.try_wait().unwrap()) {
        (_, None) => false,
        (Fault::AbortAt(..), Some(status)) => was_killed_by(status, SIGABRT),
        (Fault::KillAfter(_), Some(status)) => was_killed_by(status, SIGKILL),
    };
    drop(shop);
    verify(&history, storage, &[], sale).await;

    let shop = Shop::open(storage);
    verify(&history, storage, &[&shop], sale).await;
    let tasks: Vec<_> = buyers
        .iter()
        .map(|buyer| {
            let (history, buyer, address) = (history.clone(), buyer.clone(), shop.address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                assert_ne!(history.buy(&mut client, sale, &buyer).await.response, Response::Unknown);
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(
        verify(&history, storage, &[&shop], sale).await,
        STOCK as usize,
        "the sale continues until it is sold out"
    );
    assert!(shop.stop().success());
    verify(&history, storage, &[], sale).await;
    died
}

/// Rounds with buyers whose sessions survive every crash.
pub async fn rounds(kind: Kind, seed: u64, faults: impl IntoIterator<Item = fn(&mut StdRng) -> Fault>) -> (u64, u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let storage = Storage::on(kind);
    let shop = Shop::open(&storage);
    let buyers = shop.log_in(0, BUYERS).await;
    assert!(shop.stop().success());
    let (mut died, mut all) = (0, 0);
    for fault in faults {
        let fault = fault(&mut rng);
        eprintln!("{kind:?}, seed {seed}, round {all}: {fault:?}");
        died += u64::from(round(&storage, &buyers, fault, &mut rng).await);
        all += 1;
    }
    (died, all)
}

async fn killed_at_random_moments(kind: Kind) {
    rounds(kind, 1, (0..count(20, 2)).map(|_| Fault::random_kill as fn(&mut StdRng) -> Fault)).await;
}

async fn aborted(kind: Kind, fault: fn(&mut StdRng) -> Fault) {
    let wanted = count(20, 1);
    let (mut died, mut seed) = (0, 100);
    // A round in which the failpoint was not reached often enough does not count.
    while died < wanted {
        died += rounds(kind, seed, (died..wanted).map(|_| fault)).await.0;
        seed += 1;
        assert!(seed < 110, "the failpoint is hardly ever reached");
    }
}

async fn aborted_after_admission(kind: Kind) {
    aborted(kind, |rng| Fault::random_abort(rng, "buy.admitted")).await;
}

async fn aborted_before_the_transaction(kind: Kind) {
    aborted(kind, |rng| Fault::random_abort(rng, "record.begin")).await;
}

async fn aborted_before_the_commit(kind: Kind) {
    aborted(kind, |rng| Fault::random_abort(rng, "record.inserted")).await;
}

async fn aborted_after_the_commit(kind: Kind) {
    aborted(kind, |rng| Fault::random_abort(rng, "record.committed")).await;
}

async fn aborted_before_the_response(kind: Kind) {
    aborted(kind, |rng| Fault::random_abort(rng, "buy.answer")).await;
}

const _: () = assert!(failpoint::BUYING.len() == 5, "a failpoint needs a test");

on_each_database!(
    killed_at_random_moments,
    aborted_after_admission,
    aborted_before_the_transaction,
    aborted_before_the_commit,
    aborted_after_the_commit,
    aborted_before_the_response
);
