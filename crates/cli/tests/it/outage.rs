//! The database is killed, disconnected, slow, read-only, or its reply to a commit is lost; the disk is full. No order is lost, duplicated or released
//! by mistake, and the sale continues without intervention.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _};
use stampede_core::SaleId;
use stampede_proof::check::Rules;
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Process, Proxy, count, until};
use tokio::task::JoinHandle;

use crate::quarantine::execute;
use crate::shop::{
    Buyer, Kind, Shop, Storage, TOKEN, command, verify, verify_through_routes, verify_with, wrapped_command,
};

pub const BUYERS: u64 = 120;
pub const STOCK: u32 = 80;

fn spawn_buyers(
    shop: &Shop,
    sale: SaleId,
    buyers: &[Buyer],
    history: &Arc<Recorder>,
    spread: Duration,
) -> Vec<JoinHandle<()>> {
    spawn_buyers_on(&[shop], sale, buyers, history, spread)
}

/// Buyers who try until they get a definite response, spread over the nodes. They start one after the other, so that a fault affects some
/// of them.
pub fn spawn_buyers_on(
    shops: &[&Shop],
    sale: SaleId,
    buyers: &[Buyer],
    history: &Arc<Recorder>,
    spread: Duration,
) -> Vec<JoinHandle<()>> {
    let step = spread / buyers.len() as u32;
    let start = |(n, buyer): (u32, &Buyer)| {
        let (history, buyer, address) = (history.clone(), buyer.clone(), shops[n as usize % shops.len()].address);
        tokio::spawn(async move {
            tokio::time::sleep(step * n).await;
            let deadline = Instant::now() + Duration::from_secs(90);
            let mut client = Client::connect(address).await.unwrap();
            while history.buy(&mut client, sale, &buyer).await.response == Response::Unknown {
                assert!(Instant::now() < deadline, "no response in time");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
    };
    (0..).zip(buyers).map(start).collect()
}

async fn verify_sold_out(
    buyers: Vec<JoinHandle<()>>,
    (storage, shop): (&Storage, &Shop),
    sale: SaleId,
    history: &Recorder,
) {
    verify_sold_out_on(Rules::default(), buyers, (storage, &[shop]), sale, history).await;
}

/// Waits for all buyers and verifies that the whole stock is sold.
pub async fn verify_sold_out_on(
    rules: Rules,
    buyers: Vec<JoinHandle<()>>,
    (storage, shops): (&Storage, &[&Shop]),
    sale: SaleId,
    history: &Recorder,
) {
    for buyer in buyers {
        buyer.await.unwrap();
    }
    assert_eq!(verify_with(rules, history, storage, shops, sale).await, STOCK as usize);
    assert_eq!(confirmations(history), STOCK as usize, "every order was confirmed");
}

fn confirmations(history: &Recorder) -> usize {
    history.ended().iter().filter(|attempt| attempt.response.is_confirmation()).count()
}

/// SIGKILL of the database under load, and its restart.
async fn database_killed(kind: Kind) {
    let server = kind.own_server();
    let storage = Storage::with(Some(kind.create_database(&server, server.port())));
    let mut command = command(&storage);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, BUYERS).await;
    for round in 0..count(5, 1) {
        let sale = shop.create_sale(STOCK).await;
        let history = Arc::new(Recorder::default());
        let tasks = spawn_buyers(&shop, sale, &buyers, &history, Duration::from_millis(400));
        tokio::time::sleep(Duration::from_millis(50 + 60 * round)).await;
        server.kill().unwrap();
        let ready = shop.client().await.get("/readyz", "").await.unwrap();
        assert_eq!(ready.status, 503, "it says that it cannot work");
        server.restart().unwrap();
        verify_sold_out(tasks, (&storage, &shop), sale, &history).await;
    }
    assert!(shop.stop().success());
}

/// Every fault of a connection, one after the other, under load.
async fn connection_faults(kind: Kind) {
    let server = kind.server().unwrap();
    let proxy = Proxy::start(server.address()).await.unwrap();
    let storage = Storage::with(Some(kind.create_database(server, proxy.address().port())));
    let mut command = command(&storage);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, BUYERS).await;
    let mut rng = StdRng::seed_from_u64(7);
    for round in 0..count(3, 1) {
        for fault in [Fault::Cut, Fault::Delay(Duration::from_millis(30)), Fault::Hang, Fault::DropResponses] {
            let sale = shop.create_sale(STOCK).await;
            let history = Arc::new(Recorder::default());
            let tasks = spawn_buyers(&shop, sale, &buyers, &history, Duration::from_millis(400));
            tokio::time::sleep(Duration::from_millis(rng.random_range(20..300))).await;
            eprintln!("{kind:?}, round {round}: {fault:?}");
            proxy.set(fault);
            tokio::time::sleep(Duration::from_millis(rng.random_range(300..900))).await;
            proxy.set(Fault::None);
            if fault == Fault::DropResponses {
                // Requests without a response are never answered; their connections are closed.
                proxy.cut_all();
            }
            verify_sold_out(tasks, (&storage, &shop), sale, &history).await;
        }
    }
    assert!(shop.stop().success());
}

/// Makes the sessions of the database read-only by default, or not, and ends those of the server, so that it opens new ones.
async fn set_read_only(kind: Kind, storage: &Storage, read_only: bool) {
    let url = storage.url();
    if kind == Kind::MariaDb {
        execute(kind, storage, &format!("SET GLOBAL tx_read_only = {read_only}")).await;
        let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
        let others = "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()";
        let others: Vec<i64> = sqlx::query_scalar(others).fetch_all(&mut connection).await.unwrap();
        for id in others.into_iter().filter(|_| read_only) {
            // It may have ended.
            let _ = sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}"))).execute(&mut connection).await;
        }
    } else {
        let name = url.rsplit('/').next().unwrap();
        let alter = format!("ALTER DATABASE {name} SET default_transaction_read_only = {read_only}");
        execute(kind, storage, &format!("BEGIN READ WRITE; {alter}; COMMIT")).await;
        if read_only {
            let others = "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
            execute(kind, storage, &format!("SELECT pg_terminate_backend(pid) FROM {others}")).await;
        }
    }
}

/// A write of an administrator. It is not retried. Returns the status.
async fn create_shop(address: SocketAddr) -> u16 {
    let mut client = Client::connect(address).await.unwrap();
    let shop = json!({ "type_id": "1", "name": "Test shop" });
    client.post("/admin/v1/shops", TOKEN, &shop).await.unwrap().status.as_u16()
}

/// The database is read-only for a while, by a setting of its sessions: connections of that time are not used afterwards.
async fn read_only_database(kind: Kind) {
    let server = kind.own_server();
    let storage = Storage::with(Some(kind.create_database(&server, server.port())));
    let mut command = command(&storage);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, BUYERS).await;
    let sale = shop.create_sale(STOCK).await;
    let ready = async || shop.client().await.get("/readyz", "").await.unwrap().status;
    assert_eq!(ready().await, 200);
    set_read_only(kind, &storage, true).await;
    let history = Arc::new(Recorder::default());
    let tasks = spawn_buyers(&shop, sale, &buyers, &history, Duration::from_millis(400));
    until("a buyer gets no confirmation", async || history.count(Response::Unknown) > 0).await;
    until("the node is not ready", async || ready().await == 503).await;
    assert_eq!(confirmations(&history), 0);
    // More writes at once than there are connections, so that all of them are opened now.
    let writes: Vec<_> = (0..24).map(|_| tokio::spawn(create_shop(shop.address))).collect();
    for write in writes {
        assert_eq!(write.await.unwrap(), 503);
    }
    set_read_only(kind, &storage, false).await;
    let writable = Instant::now();
    until("an order is confirmed", async || confirmations(&history) > 0).await;
    until("the node is ready", async || ready().await == 200).await;
    assert!(writable.elapsed() < Duration::from_secs(10), "it took {:?}", writable.elapsed());
    for _ in 0..24 {
        assert_eq!(create_shop(shop.address).await, 201, "a connection is still read-only");
    }
    verify_sold_out(tasks, (&storage, &shop), sale, &history).await;
    assert!(shop.stop().success());
}

on_each_database!(servers: database_killed, connection_faults, read_only_database);

/// The disk fills up under load: no confirmation without a row, and when there is space again the sale continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_survives_a_full_disk() {
    let storage = crate::shop::temporary_storage();
    // A limit of the file size stands in for a full disk; it is lifted from outside while the server runs.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_stampede")]);
    let mut command = wrapped_command(limited, &storage);
    command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "500").env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, BUYERS).await;
    let limit = |bytes: &str| {
        let pid = shop.process.pid().to_string();
        let set = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={bytes}:unlimited")]).status();
        assert!(set.unwrap().success());
    };
    for extra in 0..count(20, 4) {
        let sale = shop.create_sale(STOCK).await;
        let history = Arc::new(Recorder::default());
        // The log is written from its start repeatedly, so that the limit is reached at every storage of a transaction.
        limit(&(1_000 + extra * 5_000).to_string());
        let tasks = spawn_buyers(&shop, sale, &buyers, &history, Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(30);
        while history.count(Response::Unknown) == 0 {
            assert!(Instant::now() < deadline, "the disk did not become full");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        verify(&history, &storage, &[], sale).await;
        limit("unlimited");
        verify_sold_out(tasks, (&storage, &shop), sale, &history).await;
    }
    assert!(shop.stop().success());
}

/// The same with a real file system that is too small, filled and freed while the server runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_survives_a_full_file_system() {
    let storage = crate::shop::temporary_storage();
    // A separate mount namespace, so that no other process sees it and nothing remains.
    let mut holding = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=32m small \"$0\" && echo mounted && exec sleep 3600";
    holding.args(["--map-root-user", "--mount", "sh", "-c", mount]).arg(storage.path());
    let mut holder = Process::start(holding).unwrap();
    holder.wait_for(Duration::from_secs(10), |line| (line == "mounted").then_some(())).unwrap();
    let open = || {
        let mut inside = Command::new("nsenter");
        inside.args(["--user", "--mount", "--preserve-credentials", "--target", &holder.pid().to_string()]);
        inside.arg(env!("CARGO_BIN_EXE_stampede"));
        let mut command = wrapped_command(inside, &storage);
        command.env("STAMPEDE__BUY__ANSWER_TIMEOUT_MS", "500").env("STAMPEDE__LOG__LEVEL", "off");
        Shop::run(command)
    };
    let within = PathBuf::from(format!("/proc/{}/root{}", holder.pid(), storage.path().display()));
    let filler = within.join("filler");
    let shop = open();
    let buyers = shop.log_in(0, BUYERS).await;
    assert!(shop.stop().success());
    for round in 0..count(20, 3) {
        // A new log must grow.
        let shop = open();
        let sale = shop.create_sale(STOCK).await;
        let history = Arc::new(Recorder::default());
        // Filled to the last byte, and a little less in every round.
        let mut file = std::fs::File::create(&filler).unwrap();
        let full = std::io::copy(&mut std::io::repeat(0), &mut file).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        let length = file.metadata().unwrap().len();
        file.set_len(length - round * 4096).unwrap();
        let tasks = spawn_buyers(&shop, sale, &buyers, &history, Duration::from_millis(100));
        let deadline = Instant::now() + Duration::from_secs(30);
        while history.count(Response::Unknown) == 0 {
            assert!(Instant::now() < deadline, "the disk did not become full");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::remove_file(&filler).unwrap();
        drop(file);
        for one in tasks {
            one.await.unwrap();
        }
        verify_through_routes(&history, &[&shop], sale).await;
        assert!(shop.stop().success());
        // SQLite cannot open a file in another namespace, so a copy is read.
        let copy = crate::shop::temporary_storage();
        std::fs::copy(within.join("stampede.db"), copy.path().join("stampede.db")).unwrap();
        assert_eq!(verify(&history, &copy, &[], sale).await, STOCK as usize);
        assert_eq!(confirmations(&history), STOCK as usize, "every order was confirmed");
    }
}
