//! The database dies, is cut off, is slow, or does not say whether it has committed; the disk is full. Nothing is lost, doubled or
//! released by mistake, and the sale goes on by itself.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use stampede_core::SaleId;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Process, Proxy, count};
use tokio::task::JoinHandle;

use crate::history::{Heard, History};
use crate::shop::{Buyer, Kind, Place, Shop, command, serving};

pub const PEOPLE: u64 = 120;
pub const STOCK: u32 = 80;

fn crowd(shop: &Shop, sale: SaleId, buyers: &[Buyer], history: &Arc<History>, spread: Duration) -> Vec<JoinHandle<()>> {
    crowd_at(&[shop], sale, buyers, history, spread)
}

/// Buyers who press until they are told yes or no, at one node or another. They come one after the other, so that a fault hits some of
/// them.
pub fn crowd_at(
    shops: &[&Shop],
    sale: SaleId,
    buyers: &[Buyer],
    history: &Arc<History>,
    spread: Duration,
) -> Vec<JoinHandle<()>> {
    let step = spread / buyers.len() as u32;
    let come = |(n, buyer): (u32, &Buyer)| {
        let (history, buyer, address) = (history.clone(), buyer.clone(), shops[n as usize % shops.len()].address);
        tokio::spawn(async move {
            tokio::time::sleep(step * n).await;
            let deadline = Instant::now() + Duration::from_secs(90);
            let mut client = Client::connect(address).await.unwrap();
            while history.buy(&mut client, sale, &buyer).await.heard == Heard::Unknown {
                assert!(Instant::now() < deadline, "never told");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    };
    (0..).zip(buyers).map(come).collect()
}

async fn all_told(crowd: Vec<JoinHandle<()>>, (place, shop): (&Place, &Shop), sale: SaleId, history: &History) {
    all_told_at(crowd, (place, &[shop]), sale, history).await;
}

/// When everybody is told: the invariants, and every one of the stock is sold.
pub async fn all_told_at(
    crowd: Vec<JoinHandle<()>>,
    (place, shops): (&Place, &[&Shop]),
    sale: SaleId,
    history: &History,
) {
    for one in crowd {
        one.await.unwrap();
    }
    assert_eq!(history.check(place, shops, sale).await, STOCK as usize);
    assert_eq!(yes(history), STOCK as usize, "each who has one was told so in the end");
}

fn yes(history: &History) -> usize {
    history.all().iter().filter(|attempt| attempt.heard.is_yes()).count()
}

/// `kill -9` of the database under load, and its return.
async fn database_killed(kind: Kind) {
    let server = kind.own_server();
    let place = Place::with(Some(kind.create_database(&server, server.port())));
    let mut command = command(&place);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, PEOPLE).await;
    for round in 0..count(5, 1) {
        let sale = shop.put_up(STOCK).await;
        let history = Arc::new(History::default());
        let crowd = crowd(&shop, sale, &buyers, &history, Duration::from_millis(400));
        tokio::time::sleep(Duration::from_millis(50 + 60 * round)).await;
        server.kill().unwrap();
        let ready = shop.client().await.get("/readyz", "").await.unwrap();
        assert_eq!(ready.status, 503, "it says that it cannot work");
        server.restart().unwrap();
        all_told(crowd, (&place, &shop), sale, &history).await;
    }
    assert!(shop.stop().success());
}

/// Everything a wire can do, one after the other, under load.
async fn wire_broken(kind: Kind) {
    let server = kind.server().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let place = Place::with(Some(kind.create_database(server, proxy.address().port())));
    let mut command = command(&place);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, PEOPLE).await;
    let mut rng = StdRng::seed_from_u64(7);
    for round in 0..count(3, 1) {
        for fault in [Fault::Cut, Fault::Delay(Duration::from_millis(30)), Fault::Hang, Fault::DropResponses] {
            let sale = shop.put_up(STOCK).await;
            let history = Arc::new(History::default());
            let crowd = crowd(&shop, sale, &buyers, &history, Duration::from_millis(400));
            tokio::time::sleep(Duration::from_millis(rng.random_range(20..300))).await;
            eprintln!("{kind:?}, round {round}: {fault:?}");
            proxy.set(fault);
            tokio::time::sleep(Duration::from_millis(rng.random_range(300..900))).await;
            proxy.set(Fault::None);
            if fault == Fault::DropResponses {
                // What was asked in the meantime will never be answered: such connections end.
                proxy.cut_all();
            }
            all_told(crowd, (&place, &shop), sale, &history).await;
        }
    }
    assert!(shop.stop().success());
}

macro_rules! on_each_server {
    ($($module:ident = $kind:expr),*) => {
        $(mod $module {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn database_killed() {
                super::database_killed($kind).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn wire_broken() {
                super::wire_broken($kind).await;
            }
        })*
    };
}

on_each_server! { mariadb = Kind::MariaDb, postgres = Kind::Postgres }

/// The disk fills up under load: no yes without its row, and when there is room again the sale goes on by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_full_on_sqlite() {
    let place = crate::shop::folder();
    // A file that may not grow stands in for a disk that is full; the limit is lifted from outside while the server runs.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_stampede")]);
    let mut command = serving(limited, &place);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "500").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, PEOPLE).await;
    let limit = |bytes: &str| {
        let pid = shop.process.pid().to_string();
        let set = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={bytes}:unlimited")]).status();
        assert!(set.unwrap().success());
    };
    for extra in 0..count(20, 4) {
        let sale = shop.put_up(STOCK).await;
        let history = Arc::new(History::default());
        // The log is written from its start again and again, so that the limit is met at every place of a transaction.
        limit(&(1_000 + extra * 5_000).to_string());
        let crowd = crowd(&shop, sale, &buyers, &history, Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(30);
        while history.count(Heard::Unknown) == 0 {
            assert!(Instant::now() < deadline, "the disk was never full");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        history.check(&place, &[], sale).await;
        limit("unlimited");
        all_told(crowd, (&place, &shop), sale, &history).await;
    }
    assert!(shop.stop().success());
}

/// The same on a real file system that is too small, filled up and freed while the server runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_full_on_a_small_file_system() {
    let place = crate::shop::folder();
    // In a mount namespace of its own, so that nobody else sees it and nothing is left behind.
    let mut holding = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=32m small \"$0\" && echo mounted && exec sleep 3600";
    holding.args(["--map-root-user", "--mount", "sh", "-c", mount]).arg(place.path());
    let mut holder = Process::start(holding).unwrap();
    holder.wait_for(Duration::from_secs(10), |line| (line == "mounted").then_some(())).unwrap();
    let open = || {
        let mut inside = Command::new("nsenter");
        inside.args(["--user", "--mount", "--preserve-credentials", "--target", &holder.pid().to_string()]);
        inside.arg(env!("CARGO_BIN_EXE_stampede"));
        let mut command = serving(inside, &place);
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "500").env("STAMPEDE__LOG__LEVEL", "off");
        Shop::run(command)
    };
    let within = PathBuf::from(format!("/proc/{}/root{}", holder.pid(), place.path().display()));
    let filler = within.join("filler");
    let shop = open();
    let buyers = shop.log_in(0, PEOPLE).await;
    assert!(shop.stop().success());
    for round in 0..count(20, 3) {
        // A log that has just been begun must grow.
        let shop = open();
        let sale = shop.put_up(STOCK).await;
        let history = Arc::new(History::default());
        // To the last byte, and a little less in every round.
        let mut file = std::fs::File::create(&filler).unwrap();
        let full = std::io::copy(&mut std::io::repeat(0), &mut file).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        let length = file.metadata().unwrap().len();
        file.set_len(length - round * 4096).unwrap();
        let crowd = crowd(&shop, sale, &buyers, &history, Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(30);
        while history.count(Heard::Unknown) == 0 {
            assert!(Instant::now() < deadline, "the disk was never full");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::remove_file(&filler).unwrap();
        drop(file);
        for one in crowd {
            one.await.unwrap();
        }
        history.check_from_outside(&[&shop], sale).await;
        assert!(shop.stop().success());
        // SQLite does not find its way into another namespace: look at a copy.
        let copy = crate::shop::folder();
        std::fs::copy(within.join("stampede.db"), copy.path().join("stampede.db")).unwrap();
        assert_eq!(history.check(&copy, &[], sale).await, STOCK as usize);
        assert_eq!(yes(&history), STOCK as usize, "each who has one was told so in the end");
    }
}
