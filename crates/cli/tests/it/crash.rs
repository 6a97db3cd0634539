//! The crowd and `kill -9`.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::failpoint;
use stampede_testkit::process::was_killed_by;
use stampede_testkit::{Client, count};

use crate::history::{Heard, History};
use crate::shop::{Buyer, Kind, Place, Shop, command};

const STOCK: u32 = 40;
const PEOPLE: u64 = 60;
const SIGKILL: i32 = 9;
const SIGABRT: i32 = 6;

#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// `kill -9` so long after the first buyer was let go.
    KillAfter(Duration),
    /// Abort when this place is reached for this time.
    AbortAt(&'static str, u64),
}

impl Fault {
    pub fn random_kill(rng: &mut StdRng) -> Self {
        Self::KillAfter(Duration::from_micros(rng.random_range(0..60_000)))
    }

    pub fn random_abort(rng: &mut StdRng, place: &'static str) -> Self {
        // A batch is passed far less often than a buyer.
        let most = if place.starts_with("record") { 6 } else { 40 };
        Self::AbortAt(place, rng.random_range(1..most))
    }
}

/// One life and the next: a crowd buys, the server dies under it, is started again, and the crowd goes on.
/// `false` if the server outlived the crowd, so that the round showed nothing.
pub async fn round(place: &Place, buyers: &[Buyer], fault: Fault, rng: &mut StdRng) -> bool {
    let mut command = command(place);
    if let Fault::AbortAt(place, hit) = fault {
        command.env("STAMPEDE_FAILPOINTS", format!("{place}=abort@{hit}"));
    }
    let mut shop = Shop::run(command);
    let sale = shop.put_up(STOCK).await;
    let history = Arc::new(History::default());

    let crowd: Vec<_> = buyers
        .iter()
        .map(|buyer| {
            let (history, buyer, address) = (history.clone(), buyer.clone(), shop.address);
            let delay = Duration::from_micros(rng.random_range(0..40_000));
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                let Ok(mut client) = Client::connect(address).await else { return };
                // A buyer presses until the server is gone, three times at most.
                for _ in 0..3 {
                    if history.buy(&mut client, sale, &buyer).await.heard == Heard::Unknown {
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
    for one in crowd {
        one.await.unwrap();
    }
    let died = match (fault, shop.process.try_wait().unwrap()) {
        (_, None) => false,
        (Fault::AbortAt(..), Some(status)) => was_killed_by(status, SIGABRT),
        (Fault::KillAfter(_), Some(status)) => was_killed_by(status, SIGKILL),
    };
    drop(shop);
    history.check(place, &[], sale).await;

    let shop = Shop::open(place);
    history.check(place, &[&shop], sale).await;
    let crowd: Vec<_> = buyers
        .iter()
        .map(|buyer| {
            let (history, buyer, address) = (history.clone(), buyer.clone(), shop.address);
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                assert_ne!(history.buy(&mut client, sale, &buyer).await.heard, Heard::Unknown);
            })
        })
        .collect();
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(history.check(place, &[&shop], sale).await, STOCK as usize, "the sale went on to its end");
    assert!(shop.stop().success());
    history.check(place, &[], sale).await;
    died
}

/// Rounds with buyers who stay logged in over every crash.
pub async fn rounds(kind: Kind, seed: u64, faults: impl IntoIterator<Item = fn(&mut StdRng) -> Fault>) -> (u64, u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let place = Place::on(kind);
    let shop = Shop::open(&place);
    let buyers = shop.log_in(0, PEOPLE).await;
    assert!(shop.stop().success());
    let (mut died, mut all) = (0, 0);
    for fault in faults {
        let fault = fault(&mut rng);
        eprintln!("{kind:?}, seed {seed}, round {all}: {fault:?}");
        died += u64::from(round(&place, &buyers, fault, &mut rng).await);
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
    // A round whose place was not reached often enough shows nothing and is not counted.
    while died < wanted {
        died += rounds(kind, seed, (died..wanted).map(|_| fault)).await.0;
        seed += 1;
        assert!(seed < 110, "the place is hardly ever reached");
    }
}

macro_rules! at_each_failpoint {
    ($module:ident, $kind:expr; $($test:ident = $place:literal),*) => {
        mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn killed_at_random_moments() {
                super::killed_at_random_moments($kind).await;
            }

            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                aborted($kind, |rng| Fault::random_abort(rng, $place)).await;
            })*

            #[test]
            fn no_failpoint_is_left_out() {
                assert_eq!(failpoint::ALL, [$($place),*]);
            }
        }
    };
}

macro_rules! at_all_five {
    ($($module:ident = $kind:expr),*) => {
        $(at_each_failpoint! { $module, $kind;
            aborted_after_admission = "buy.admitted",
            aborted_before_the_transaction = "record.begin",
            aborted_before_the_commit = "record.inserted",
            aborted_after_the_commit = "record.committed",
            aborted_before_the_answer = "buy.answer"
        })*
    };
}

at_all_five! { sqlite = Kind::Sqlite, mariadb = Kind::MariaDb, postgres = Kind::Postgres }
