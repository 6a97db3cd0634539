//! A running server with buyers, and the verification of what they received.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use serde_json::{Value, json};
use stampede_core::ports::Ledger;
use stampede_core::ports::Stores;
use stampede_core::{SaleId, SystemClock, Timestamp};
use stampede_ledger::Database;
use stampede_proof::check::{Line, Polling, Rules};
use stampede_proof::recorder::Recorder;
use stampede_proof::system::System;
use stampede_testkit::{Client, FakeClock, Process, Reply, Server, mariadb, postgres, until};
use tempfile::TempDir;

use crate::contract;

pub use stampede_proof::recorder::Buyer;

pub const TOKEN: &str = "an-admin-token-for-tests-5d0c81f7e92a";

static MARIADB: LazyLock<Server> = LazyLock::new(|| mariadb::start().unwrap());
static POSTGRES: LazyLock<Server> = LazyLock::new(|| postgres::start().unwrap());

/// A data directory, not on tmpfs, and a database for one server.
pub struct Storage {
    dir: PathBuf,
    url: Option<String>,
    _directory: Option<TempDir>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Sqlite,
    MariaDb,
    Postgres,
}

impl Kind {
    /// The database server that all tests share.
    pub fn server(self) -> Option<&'static Server> {
        match self {
            Self::Sqlite => None,
            Self::MariaDb => Some(&MARIADB),
            Self::Postgres => Some(&POSTGRES),
        }
    }

    /// A separate database server, which the test may kill.
    pub fn own_server(self) -> Server {
        match self {
            Self::Sqlite => panic!("SQLite has no server"),
            Self::MariaDb => mariadb::start().unwrap(),
            Self::Postgres => postgres::start().unwrap(),
        }
    }

    /// A separate database server with a clock that the test sets.
    pub fn own_server_with_clock(self, clock: &FakeClock) -> Server {
        match self {
            Self::Sqlite => panic!("SQLite has no server"),
            Self::MariaDb => mariadb::start_with_env(clock.environment()).unwrap(),
            Self::Postgres => postgres::start_with_env(clock.environment()).unwrap(),
        }
    }

    /// Creates a database on this server and returns its URL with `port`, which may be a proxy's.
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

/// Temporary storage on SQLite.
pub fn temporary_storage() -> Storage {
    Storage::on(Kind::Sqlite)
}

impl Storage {
    pub fn on(kind: Kind) -> Self {
        Self::with(kind.server().map(|server| kind.create_database(server, server.port())))
    }

    /// A new data directory with the database of this URL.
    pub fn with(url: Option<String>) -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { dir: directory.path().to_owned(), url, _directory: Some(directory) }
    }

    /// An existing data directory.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), url: None, _directory: None }
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        self.url.clone().unwrap_or_else(|| format!("sqlite:{}", self.dir.join("stampede.db").display()))
    }
}

/// The command `serve --demo` on a free port with high limits.
pub fn command(storage: &Storage) -> Command {
    wrapped_command(Command::new(env!("CARGO_BIN_EXE_stampede")), storage)
}

/// The command `serve` on a free port with default settings.
pub fn default_settings(storage: &Storage) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&storage.dir);
    command.env("STAMPEDE_ADMIN_TOKEN", TOKEN).env("STAMPEDE__LOG__LEVEL", "warn");
    command
}

/// Like [`command`], run by another command such as `strace`.
pub fn wrapped_command(command: Command, storage: &Storage) -> Command {
    let mut command = demo_command(command, storage);
    for limit in [
        "ADMIN__WRONG_TOKENS_PER_ADDRESS",
        "LOGIN__PER_ADDRESS",
        "LOGIN__CODES_PER_ADDRESS",
        "LOGIN__CODES_PER_SHOP",
        "BUY__PER_USER",
        "BUY__PER_ADDRESS",
        "LIMITS__READS_PER_ADDRESS",
        "LIMITS__SEARCHES_PER_ADDRESS",
        "LIMITS__PROBES_PER_ADDRESS",
        "LIMITS__OWN_PER_USER",
    ] {
        command.env(format!("STAMPEDE__{limit}__COUNT"), "100000000");
    }
    command.env("STAMPEDE__HTTP__MAX_CONNECTIONS_PER_ADDRESS", "1000000");
    command
}

/// The command `serve --demo` on a free port with default limits.
pub fn default_demo_command(storage: &Storage) -> Command {
    demo_command(Command::new(env!("CARGO_BIN_EXE_stampede")), storage)
}

fn demo_command(mut command: Command, storage: &Storage) -> Command {
    command
        .args(["serve", "--demo", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(&storage.dir)
        .env("STAMPEDE_ADMIN_TOKEN", TOKEN)
        .env("STAMPEDE__LOG__LEVEL", "error");
    if let Some(url) = &storage.url {
        command.args(["--database", url]);
    }
    command
}

pub struct Shop {
    pub process: Process,
    pub address: SocketAddr,
}

impl Shop {
    pub fn open(storage: &Storage) -> Self {
        Self::run(command(storage))
    }

    pub fn run(command: Command) -> Self {
        stampede_testkit::observe(contract::judge);
        let mut process = Process::start(command).unwrap();
        let address = process.wait_for(Duration::from_secs(60), |line| {
            let line = line.trim();
            let (_, address) = line.strip_prefix("open").or_else(|| line.strip_prefix("health"))?.split_once("://")?;
            address.split('/').next()?.parse().ok()
        });
        Self { address: address.expect("the server did not start"), process }
    }

    /// Stops the server with SIGTERM.
    pub fn stop(mut self) -> ExitStatus {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(30)).unwrap()
    }

    /// Waits until the server shows the sale, which another node may have created.
    pub async fn wait_for_sale(&self, sale: SaleId) {
        until("the sale is visible", async || self.shows(sale).await).await;
    }

    /// Whether the server runs and shows the sale.
    pub async fn shows(&self, sale: SaleId) -> bool {
        let Ok(mut client) = Client::connect(self.address).await else { return false };
        client.get(&format!("/v1/sales/{sale}"), "").await.is_ok_and(|reply| reply.status == 200)
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    pub async fn admin(&self, path: &str, body: &Value) -> Reply {
        self.client().await.post(&format!("/admin/v1/{path}"), TOKEN, body).await.unwrap()
    }

    /// Creates a sale that is open for the next hour.
    pub async fn create_sale(&self, stock: u32) -> SaleId {
        let now = stampede_core::Clock::now(&SystemClock);
        self.create_sale_between(stock, now, now.plus(Duration::from_secs(3600))).await
    }

    pub async fn create_sale_between(&self, stock: u32, begin: Timestamp, end: Timestamp) -> SaleId {
        let made = self.try_create_sale(stock, begin, end).await;
        assert_eq!(made.status, 201, "{:?}", made.body);
        made.text("id").parse().unwrap()
    }

    /// Creates a sale, which may fail while the gate cannot be used.
    pub async fn try_create_sale(&self, stock: u32, begin: Timestamp, end: Timestamp) -> Reply {
        let voucher = self.create_voucher().await;
        let sale = json!({ "voucher_id": voucher, "stock": stock, "begin": begin, "end": end });
        self.admin("sales", &sale).await
    }

    /// Creates a voucher in a shop of its own, and returns its id.
    pub async fn create_voucher(&self) -> String {
        let shop = self.admin("shops", &json!({ "type_id": "1", "name": "Test shop" })).await.text("id");
        let voucher = json!({
            "shop_id": shop, "kind": "flash_sale", "title": "Test", "price_cents": 100, "worth_cents": 200,
        });
        self.admin("vouchers", &voucher).await.text("id")
    }

    /// Logs in the buyers `from..from + count`, each by a code.
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

    /// A counter or gauge of `/metrics` by its full name.
    pub async fn metric(&self, name: &str) -> f64 {
        metric(&mut self.client().await, name).await
    }

    /// Whether `/metrics` has this text. Some metrics appear with their first value.
    pub async fn has_metric(&self, text: &str) -> bool {
        let metrics = self.client().await.get("/metrics", TOKEN).await.unwrap();
        String::from_utf8_lossy(&metrics.body).contains(text)
    }
}

/// A counter or gauge of `/metrics` by its full name.
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
    let reply = client.post("/v1/login", "", &login).await.unwrap();
    assert_eq!(reply.status, 200, "{:?}", reply.body);
    let id = reply.json()["user"]["id"].as_str().unwrap().parse().unwrap();
    Buyer { id, token: reply.text("token") }
}

/// Opens the server's database.
pub async fn ledger(storage: &Storage) -> Stores {
    stampede_ledger::open(&Database::parse(&storage.url()).unwrap()).await.unwrap()
}

/// Opens the server's database read-only.
pub async fn read_only(storage: &Storage) -> Arc<dyn Ledger> {
    stampede_ledger::open_read_only(&Database::parse(&storage.url()).unwrap()).await.unwrap()
}

/// How long a system may take to become idle.
const POLLING: Polling = Polling { duration: Duration::from_secs(20), interval: Duration::from_millis(100) };

/// Checks the invariants with the database and the gates of these nodes; with the database alone if the system is stopped. Panics on a
/// violation. Returns the number of live orders.
pub async fn verify(history: &Recorder, storage: &Storage, nodes: &[&Shop], sale: SaleId) -> usize {
    verify_with(Rules::default(), history, storage, nodes, sale).await
}

/// Like [`verify`], with other rules.
pub async fn verify_with(rules: Rules, history: &Recorder, storage: &Storage, nodes: &[&Shop], sale: SaleId) -> usize {
    let ledger = Some(read_only(storage).await);
    verify_system(rules, history, System { ledger, ..system(nodes) }, sale).await
}

/// Like [`verify`], with the ledger read through the first node.
pub async fn verify_through_routes(history: &Recorder, nodes: &[&Shop], sale: SaleId) -> usize {
    verify_system(Rules::default(), history, system(nodes), sale).await
}

/// Like [`verify`], and returns the violations instead of the number of orders.
pub async fn violations(history: &Recorder, storage: &Storage, nodes: &[&Shop], sale: SaleId) -> Vec<String> {
    let ledger = Some(read_only(storage).await);
    check_system(Rules::default(), history, System { ledger, ..system(nodes) }, sale).await.1
}

async fn verify_system(rules: Rules, history: &Recorder, system: System, sale: SaleId) -> usize {
    let (live, failed) = check_system(rules, history, system, sale).await;
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    live
}

/// The number of live orders, and the violations.
async fn check_system(rules: Rules, history: &Recorder, system: System, sale: SaleId) -> (usize, Vec<String>) {
    let rules = Rules { at_rest: true, ..rules };
    let (evidence, lines) = system.check(&[sale], POLLING, rules, Some(&history.all())).await.unwrap();
    let failed = lines.iter().filter(|line| line.failed()).map(Line::to_string).collect();
    if let Some(ledger) = system.ledger {
        ledger.close().await;
    }
    (evidence[0].ledger.orders.iter().filter(|row| row.live).count(), failed)
}

fn system(nodes: &[&Shop]) -> System {
    let admins = nodes.iter().map(|shop| shop.address).collect();
    System {
        addresses: Vec::new(),
        admins,
        token: TOKEN.to_owned(),
        nodes: Vec::new(),
        late_consumer: None,
        ledger: None,
    }
}
