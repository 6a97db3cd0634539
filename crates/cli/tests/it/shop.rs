//! A running server, and buyers in it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::ports::Ledger;
use stampede_core::ports::Stores;
use stampede_core::{SaleId, SystemClock, Timestamp};
use stampede_ledger::Database;
use stampede_testkit::{Client, FakeClock, Process, Reply, Server, mariadb, postgres};
use tempfile::TempDir;

use crate::contract;

pub const TOKEN: &str = "an-admin-token-for-tests-5d0c81f7e92a";

static MARIADB: LazyLock<Server> = LazyLock::new(|| mariadb::start().unwrap());
static POSTGRES: LazyLock<Server> = LazyLock::new(|| postgres::start().unwrap());

/// Where a shop keeps its things: a data folder of its own, not on tmpfs, and a database of its own.
pub struct Place {
    dir: PathBuf,
    url: Option<String>,
    _folder: Option<TempDir>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    MariaDb,
    Postgres,
}

impl Kind {
    /// The server of this kind that all tests share.
    pub fn server(self) -> Option<&'static Server> {
        match self {
            Self::Sqlite => None,
            Self::MariaDb => Some(&MARIADB),
            Self::Postgres => Some(&POSTGRES),
        }
    }

    /// A server of this kind that is this test's alone, so that it may be killed.
    pub fn own_server(self) -> Server {
        match self {
            Self::Sqlite => panic!("SQLite has no server"),
            Self::MariaDb => mariadb::start().unwrap(),
            Self::Postgres => postgres::start().unwrap(),
        }
    }

    /// The same, by a clock that the test sets.
    pub fn own_server_by(self, clock: &FakeClock) -> Server {
        match self {
            Self::Sqlite => panic!("SQLite has no server"),
            Self::MariaDb => mariadb::start_with_env(clock.environment()).unwrap(),
            Self::Postgres => postgres::start_with_env(clock.environment()).unwrap(),
        }
    }

    /// A new database on this server; its URL behind `port`.
    pub fn create_database(self, server: &Server, port: u16) -> String {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("shop{}", NEXT.fetch_add(1, Ordering::SeqCst));
        match self {
            Self::Sqlite => panic!("SQLite has no server"),
            Self::MariaDb => mariadb::create_database(server, &name).map(|_| mariadb::url(port, &name)).unwrap(),
            Self::Postgres => postgres::create_database(server, &name).map(|_| postgres::url(port, &name)).unwrap(),
        }
    }
}

/// A place on SQLite.
pub fn folder() -> Place {
    Place::on(Kind::Sqlite)
}

impl Place {
    pub fn on(kind: Kind) -> Self {
        Self::with(kind.server().map(|server| kind.create_database(server, server.port())))
    }

    /// With the database of this URL.
    pub fn with(url: Option<String>) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { dir: folder.path().to_owned(), url, _folder: Some(folder) }
    }

    /// In a folder that somebody else looks after.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), url: None, _folder: None }
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        self.url.clone().unwrap_or_else(|| format!("sqlite:{}", self.dir.join("stampede.db").display()))
    }
}

/// The binary's `serve`, on a free port, with limits that let a crowd through.
pub fn command(place: &Place) -> Command {
    serving(Command::new(env!("CARGO_BIN_EXE_stampede")), place)
}

/// The binary's `serve` on a free port with the settings that everyone has who sets none.
pub fn default_settings(place: &Place) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&place.dir);
    command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).env("STAMPEDE__LOG__LEVEL", "warn");
    command
}

/// The same, behind a command that runs it.
pub fn serving(command: Command, place: &Place) -> Command {
    let mut command = at_defaults(command, place);
    for limit in [
        "ADMIN__WRONG_TOKENS_PER_IP",
        "LOGIN__PER_IP",
        "LOGIN__CODES_PER_ADDRESS",
        "LOGIN__CODES_PER_SHOP",
        "BUY__PER_USER",
        "BUY__PER_IP",
        "LIMITS__READS_PER_IP",
        "LIMITS__SEARCHES_PER_IP",
        "LIMITS__PROBES_PER_IP",
        "LIMITS__OWN_PER_USER",
    ] {
        command.env(format!("STAMPEDE__{limit}__COUNT"), "100000000");
    }
    command.env("STAMPEDE__HTTP__MAX_CONNECTIONS_PER_ADDRESS", "1000000");
    command
}

/// A demonstration, which shows its codes, with every limit at its default.
pub fn default_command(place: &Place) -> Command {
    at_defaults(Command::new(env!("CARGO_BIN_EXE_stampede")), place)
}

fn at_defaults(mut command: Command, place: &Place) -> Command {
    command
        .args(["serve", "--demo", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(&place.dir)
        .env("STAMPEDE_ADMIN_TOKEN", TOKEN)
        .env("STAMPEDE__LOG__LEVEL", "error");
    if let Some(url) = &place.url {
        command.args(["--database", url]);
    }
    command
}

pub struct Shop {
    pub process: Process,
    pub address: SocketAddr,
}

#[derive(Debug, Clone)]
pub struct Buyer {
    pub id: String,
    pub token: String,
}

impl Shop {
    pub fn open(place: &Place) -> Self {
        Self::run(command(place))
    }

    pub fn run(command: Command) -> Self {
        stampede_testkit::observe(contract::judge);
        let mut process = Process::start(command).unwrap();
        let address = process.wait_for(Duration::from_secs(60), |line| {
            let (_, address) = line.trim().strip_prefix("open")?.split_once("://")?;
            address.strip_suffix('/')?.parse().ok()
        });
        Self { address: address.expect("the server did not start"), process }
    }

    /// As an operator stops it.
    pub fn stop(mut self) -> ExitStatus {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(30)).unwrap()
    }

    /// Waits until the shop shows the sale: another node may have made it.
    pub async fn knows(&self, sale: SaleId) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut client = self.client().await;
        while client.get(&format!("/v1/sales/{sale}"), "").await.unwrap().status != 200 {
            assert!(Instant::now() < deadline, "the sale never came");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    pub async fn admin(&self, path: &str, body: &Value) -> Reply {
        self.client().await.post(&format!("/admin/v1/{path}"), TOKEN, body).await.unwrap()
    }

    /// A sale that is on for the next hour.
    pub async fn put_up(&self, stock: u32) -> SaleId {
        let now = stampede_core::Clock::now(&SystemClock);
        self.put_up_between(stock, now, now.plus(Duration::from_secs(3600))).await
    }

    pub async fn put_up_between(&self, stock: u32, begin: Timestamp, end: Timestamp) -> SaleId {
        let shop = self.admin("shops", &json!({ "type_id": "1", "name": "Test shop" })).await.text("id");
        let voucher = json!({
            "shop_id": shop, "kind": "flash_sale", "title": "Test", "price_cents": 100, "worth_cents": 200,
        });
        let voucher = self.admin("vouchers", &voucher).await.text("id");
        let sale = json!({ "voucher_id": voucher, "stock": stock, "begin": begin, "end": end });
        let made = self.admin("sales", &sale).await;
        assert_eq!(made.status, 201, "{:?}", made.body);
        made.text("id").parse().unwrap()
    }

    /// Buyers `from..from + count`, each logged in by a code.
    pub async fn log_in(&self, from: u64, count: u64) -> Vec<Buyer> {
        let lanes = 32.min(count);
        let tasks: Vec<_> = (0..lanes)
            .map(|lane| {
                let mine: Vec<u64> = (from + lane..from + count).step_by(lanes as usize).collect();
                let address = self.address;
                tokio::spawn(async move {
                    let mut client = Client::connect(address).await.unwrap();
                    let mut buyers = Vec::new();
                    for n in mine {
                        buyers.push(log_in(&mut client, &format!("13{n:09}")).await);
                    }
                    buyers
                })
            })
            .collect();
        let mut buyers = Vec::new();
        for task in tasks {
            buyers.extend(task.await.unwrap());
        }
        buyers
    }

    /// The counters and gauges of `/metrics`, by their full name.
    pub async fn metric(&self, name: &str) -> f64 {
        metric(&mut self.client().await, name).await
    }
}

/// A counter or gauge of `/metrics`, by its full name.
pub async fn metric(client: &mut Client, name: &str) -> f64 {
    let text = client.get("/metrics", TOKEN).await.unwrap();
    let text = String::from_utf8(text.body.to_vec()).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no metric {name} in\n{text}")).parse().unwrap()
}

pub async fn log_in(client: &mut Client, phone: &str) -> Buyer {
    let sent = client.post("/v1/login/codes", "", &json!({ "phone": phone })).await.unwrap();
    assert_eq!(sent.status, 200, "{:?}", sent.body);
    let login = json!({ "phone": phone, "code": sent.text("demo_code"), "challenge": sent.text("challenge") });
    let answer = client.post("/v1/login", "", &login).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let id = answer.json()["user"]["id"].as_str().unwrap().to_owned();
    Buyer { id, token: answer.text("token") }
}

/// The server's database, beside it or after it.
pub async fn ledger(place: &Place) -> Stores {
    stampede_ledger::open(&Database::parse(&place.url()).unwrap()).await.unwrap()
}

/// The same, only to be read.
pub async fn read_only(place: &Place) -> Arc<dyn Ledger> {
    stampede_ledger::open_read_only(&Database::parse(&place.url()).unwrap()).await.unwrap()
}
