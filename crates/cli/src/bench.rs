//! `stampede bench`: a load test with verification.

use std::fs::File;
use std::io::{BufWriter, IsTerminal as _, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use rand::RngExt as _;
use stampede_ledger::{Database, RawInserts};
use stampede_proof::bench::{self, Options, Progress};
use stampede_proof::generator::RunClock;
use stampede_proof::history;
use stampede_proof::report::{Drain, Report};
use stampede_proof::servers::Server;
use stampede_proof::system::{LateConsumer, Node, System};

use crate::admin_token::AdminTokenSource;
use crate::private_servers::{NodeCommand, PrivateDatabase, start_rabbitmq, start_redis};
use crate::settings::{QueueKind, Tier};

#[derive(Debug, Args)]
pub struct Bench {
    /// The address for buyers of a running system, such as http://127.0.0.1:8080; allow_load_test must be set there
    #[arg(long, value_name = "URL", conflicts_with_all = ["tier", "nodes", "private_servers", "kill", "data_dir"])]
    target: Option<String>,

    /// The address for administrators [default: the target]
    #[arg(long, value_name = "URL", requires = "target")]
    admin: Option<String>,

    #[command(flatten)]
    admin_token: AdminTokenSource,

    /// Start a system of this tier as separate processes, and stop it afterwards
    #[arg(long, value_enum, default_value_t = Tier::Solo)]
    tier: Tier,

    /// The URL of the ledger's database; with --private-servers: mariadb or postgres [default: solo: embedded SQLite; other tiers: a
    /// private PostgreSQL]
    #[arg(long, value_name = "URL")]
    database: Option<String>,

    /// The Redis of the tiers shared, queued and shielded [default: a private one that syncs its append-only file once a second]
    #[arg(long, value_name = "URL", conflicts_with = "target")]
    redis: Option<String>,

    /// The queue of the tiers queued and shielded
    #[arg(long, value_enum, default_value_t = QueueKind::RedisStream, conflicts_with = "target")]
    queue: QueueKind,

    /// The RabbitMQ of --queue rabbitmq [default: a private one]
    #[arg(long, value_name = "URL", conflicts_with = "target")]
    amqp: Option<String>,

    /// Start a private MariaDB or PostgreSQL for this run, and in all tiers but solo a private Redis; they must be installed
    #[arg(long)]
    private_servers: bool,

    /// Number of processes that share the ledger; more than one needs MariaDB, MySQL or PostgreSQL
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    nodes: u16,

    /// In the tiers queued and shielded: record nothing while it is measured. Only answers are measured, and the orders are recorded before
    /// the verification
    #[arg(long, conflicts_with = "target")]
    no_consumers: bool,

    /// In the tiers queued and shielded: record nothing while it is measured, then measure how fast one consumer records what waits in the
    /// queue, and how fast the same rows are inserted into a copy of the table (bench_orders, in the same database) without anything else
    #[arg(long, conflicts_with = "target")]
    drain: bool,

    /// Number of buyers; in the phase "orders", each of them gets one order per sale
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    buyers: u32,

    /// Stock in the storm
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    stock: u32,

    /// Attempts per buyer in the storm
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    tries: u32,

    /// Number of connections, with one request at a time on each
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,

    /// Open loop: requests per second, independent of the server's speed; latency counts from the scheduled time
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<f64>,

    /// Total time for which each kind of request is measured
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,

    /// Minimum duration of the storm
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    storm_seconds: f64,

    /// Seed of the random order of buyers; it is printed, so that a run can be repeated [default: random]
    #[arg(long)]
    seed: Option<u64>,

    /// Kill every node with SIGKILL once during the storm, and start it again
    #[arg(long)]
    kill: bool,

    /// Directory for the data of the nodes [default: a temporary directory in the current one]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Write report.html, rates.svg, slowest.svg and report.json to this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,

    /// Write every attempt and its response to this file, one JSON object per line, for `stampede check --history`
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
}

/// Resolves the host and port of a URL. Load tests use plain HTTP, so that they do not measure TLS.
pub fn address_of(url: &str) -> anyhow::Result<SocketAddr> {
    let rest =
        url.strip_prefix("http://").with_context(|| format!("{url:?} is not a URL such as http://127.0.0.1:8080"))?;
    let host = rest.split('/').next().unwrap_or_default();
    let host = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    host.to_socket_addrs()
        .with_context(|| format!("cannot resolve {host}"))?
        .next()
        .with_context(|| format!("cannot resolve {host}"))
}

/// Nothing is violated, and the figures do not show what the system can do.
const NOT_MEASURED: u8 = 2;

/// A running system, and the resources that it needs.
struct Running {
    system: System,
    tier: String,
    /// `None`: a running system.
    database: Option<Database>,
    _servers: Vec<Server>,
    _directory: Option<tempfile::TempDir>,
}

impl Bench {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        // The load generator has its own threads; this one only waits.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.measure())
    }

    async fn measure(&self) -> anyhow::Result<ExitCode> {
        if self.rate.is_some_and(|rate| !rate.is_finite() || rate <= 0.0) {
            bail!("--rate must be above zero");
        }
        if (self.no_consumers || self.drain) && !self.tier.has_queue() {
            bail!("--no-consumers and --drain are for the tiers queued and shielded");
        }
        if self.queue == QueueKind::RabbitMq && !self.tier.has_queue() {
            bail!("--queue is for the tiers queued and shielded");
        }
        if !(0.01..=3600.0).contains(&self.seconds) {
            bail!("--seconds must be between 0.01 and 3600");
        }
        if !(0.0..=3600.0).contains(&self.storm_seconds) {
            bail!("--storm-seconds must be between 0 and 3600");
        }
        let mut running = match &self.target {
            Some(target) => self.attach(target).await?,
            None => self.start().await?,
        };
        let seed = self.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000));
        let options = Options {
            buyers: self.buyers as usize,
            stock: self.stock as usize,
            tries: self.tries as usize,
            connections: self.connections as usize,
            rate: self.rate,
            seed,
            measure: Duration::from_secs_f64(self.seconds),
            storm: Duration::from_secs_f64(self.storm_seconds),
            storm_connections: None,
            kill: self.kill,
            drain: self.drain,
        };
        let clock = RunClock::new();
        let bar = Bar::start(&clock, self.json);
        let done = bench::run(&mut running.system, options, &clock, &bar).await;
        bar.finish();
        let (mut report, history) = done.with_context(|| format!("seed {seed}"))?;
        report.tier.clone_from(&running.tier);
        if let (Some(drain), Some(database)) = (&mut report.drain, &running.database) {
            compare_with_raw_inserts(drain, &running.system, database).await.context("raw inserts")?;
        }
        // Closed before the nodes stop: the last connection to an SQLite database checkpoints its log, and that should be a node's.
        if let Some(ledger) = running.system.ledger.take() {
            ledger.close().await;
        }
        for node in running.system.nodes.drain(..) {
            node.stop().context("a node did not stop cleanly")?;
        }
        if let Some(path) = &self.history {
            let file = File::create(path).with_context(|| path.display().to_string())?;
            history::write(&history, BufWriter::new(file)).with_context(|| path.display().to_string())?;
        }
        if let Some(directory) = &self.report {
            write_report(&report, directory).with_context(|| directory.display().to_string())?;
        }
        let mut out = std::io::stdout().lock();
        if self.json {
            writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
        } else {
            write!(out, "{report}")?;
        }
        if let Some(why) = &report.distorted {
            eprintln!("stampede: {why}");
        }
        Ok(match (report.violations.is_empty(), report.distorted.is_some()) {
            (false, _) => ExitCode::FAILURE,
            (true, true) => ExitCode::from(NOT_MEASURED),
            (true, false) => ExitCode::SUCCESS,
        })
    }

    /// Uses a system that is already running.
    async fn attach(&self, target: &str) -> anyhow::Result<Running> {
        let address = address_of(target)?;
        let admin = self.admin.as_deref().map_or(Ok(address), address_of)?;
        let token = self.admin_token.read()?;
        let ledger = match &self.database {
            Some(url) => Some(stampede_ledger::open_read_only(&Database::parse(url)?).await?),
            None => None,
        };
        let system = System {
            addresses: vec![address],
            admins: vec![admin],
            token,
            nodes: Vec::new(),
            late_consumer: None,
            ledger,
        };
        Ok(Running { system, tier: "target".to_owned(), database: None, _servers: Vec::new(), _directory: None })
    }

    /// Starts the nodes of a new system.
    async fn start(&self) -> anyhow::Result<Running> {
        let directory = match &self.data_dir {
            Some(_) => None,
            None => Some(tempfile::Builder::new().prefix("stampede-bench-").tempdir_in(".")?),
        };
        let data = directory
            .as_ref()
            .map(tempfile::TempDir::path)
            .or(self.data_dir.as_deref())
            .context("no data directory")?;
        let mut servers = Vec::new();
        let url = self.database(&mut servers)?;
        if self.nodes > 1 && url.is_none() {
            bail!("--nodes needs a database that processes can share: --database mysql://… or postgres://…");
        }
        let redis = match (self.tier, &self.redis) {
            (Tier::Solo, None) => None,
            (Tier::Solo, Some(_)) => bail!("the tier solo does not use Redis"),
            (_, Some(url)) => Some(url.clone()),
            (_, None) => {
                let (server, url) = start_redis()?;
                servers.push(server);
                Some(url)
            }
        };
        let amqp = match (self.queue, &self.amqp) {
            (QueueKind::RedisStream, None) => None,
            (QueueKind::RedisStream, Some(_)) => bail!("--amqp is for --queue rabbitmq"),
            (QueueKind::RabbitMq, Some(url)) => Some(url.clone()),
            (QueueKind::RabbitMq, None) => {
                let (server, url) = start_rabbitmq()?;
                servers.push(server);
                Some(url)
            }
        };
        let token = format!("{:032x}", rand::rng().random::<u128>());
        let process = |name: String| {
            let mut node = node_command(data.join(name), &token, self.buyers)?.arg("--tier", self.tier.as_str());
            if self.tier.has_queue() {
                node = node.arg("--queue", self.queue.as_str());
            }
            for (name, value) in [("--database", &url), ("--redis", &redis), ("--amqp", &amqp)] {
                if let Some(value) = value {
                    node = node.arg(name, value);
                }
            }
            anyhow::Ok(node)
        };
        let consumer = process("consumer".to_owned())?.subcommand("work");
        let mut nodes = Vec::new();
        for n in 0..self.nodes {
            let mut node = process(format!("node-{n}"))?;
            if self.no_consumers || self.drain {
                node = node.env("STAMPEDE__QUEUE__CONSUME", "false");
            }
            nodes.push(Node::start(move |listen| node.command(listen))?);
        }
        let path = data.join("node-0").join("stampede.db");
        let database = url.as_deref().map_or(Ok(Database::Sqlite(path)), Database::parse)?;
        let ledger = Some(stampede_ledger::open_read_only(&database).await?);
        let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
        let late_consumer = match self.no_consumers || self.drain {
            true => Some(LateConsumer::new(move |listen| consumer.command(listen))),
            false => None,
        };
        let system = System { admins: addresses.clone(), addresses, token, nodes, late_consumer, ledger };
        let (tier, database) = (self.tier.as_str().to_owned(), Some(database));
        Ok(Running { system, tier, database, _servers: servers, _directory: directory })
    }

    /// The URL of the database, which is started if it is to be a private one; `None`: embedded SQLite.
    fn database(&self, servers: &mut Vec<Server>) -> anyhow::Result<Option<String>> {
        let private = match (self.private_servers, self.database.as_deref()) {
            (true, Some(name)) => PrivateDatabase::parse(name)
                .with_context(|| format!("--private-servers can start mariadb or postgres, not {name:?}"))?,
            (true, None) if self.tier == Tier::Solo => {
                bail!("--private-servers needs --database mariadb or --database postgres")
            }
            (_, None) if self.tier.has_redis() => PrivateDatabase::Postgres,
            (_, None) => return Ok(None),
            (false, Some(url)) => {
                if matches!(Database::parse(url)?, Database::Sqlite(_)) {
                    bail!("for embedded SQLite, use --data-dir or no option");
                }
                return Ok(Some(url.to_owned()));
            }
        };
        let (server, url) = private.start()?;
        servers.push(server);
        Ok(Some(url))
    }
}

/// Inserts the rows that a consumer has recorded once more, into a copy of the table, with as many rows in a transaction.
async fn compare_with_raw_inserts(drain: &mut Drain, system: &System, database: &Database) -> anyhow::Result<()> {
    let ledger = system.ledger.as_ref().context("the ledger cannot be read")?;
    let mut sales = Vec::new();
    for &sale in &drain.sales {
        sales.push(ledger.inspect(sale).await?.with_context(|| format!("there is no sale {sale}"))?);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "orders in a transaction")]
    let batch = drain.batch.round().max(1.0) as usize;
    // As many threads as a consumer has.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let database = database.clone();
    let inserting = move || runtime.block_on(async { stampede_ledger::raw_inserts(&database, &sales, batch).await });
    let RawInserts { rows, elapsed } = tokio::task::spawn_blocking(inserting).await??;
    drain.compare(rows, elapsed);
    Ok(())
}

/// Fewer buyers than this try more often than the limit per user allows.
const MIN_BUYERS_WITHIN_LIMIT: u32 = 10_000;

/// The command of a node that allows load tests, with limits that one address does not reach. The limit per user stays if there are enough
/// buyers: how often requests are counted in Redis depends on it.
pub fn node_command(data_dir: PathBuf, token: &str, buyers: u32) -> anyhow::Result<NodeCommand> {
    let mut command =
        NodeCommand::new(data_dir)?.env("STAMPEDE_ADMIN_TOKEN", token).env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    if buyers < MIN_BUYERS_WITHIN_LIMIT {
        command = command.env("STAMPEDE__BUY__PER_USER__COUNT", "1000000");
    }
    for (setting, value) in [
        ("LOG__LEVEL", "error"),
        ("HTTP__MAX_CONNECTIONS", "200000"),
        ("HTTP__MAX_CONNECTIONS_PER_ADDRESS", "200000"),
        ("BUY__PER_ADDRESS__COUNT", "1000000000"),
        ("LOGIN__PER_ADDRESS__COUNT", "100000000"),
        ("LOGIN__CODES_PER_ADDRESS__COUNT", "100000000"),
        ("LOGIN__CODES_PER_IPV6_56__COUNT", "100000000"),
        ("LOGIN__CODES_PER_IPV6_48__COUNT", "100000000"),
        ("ADMIN__WRONG_TOKENS_PER_ADDRESS__COUNT", "100000000"),
        ("LIMITS__OWN_PER_USER__COUNT", "1000000"),
        ("LIMITS__READS_PER_ADDRESS__COUNT", "100000000"),
        ("LIMITS__SEARCHES_PER_ADDRESS__COUNT", "100000000"),
        ("LIMITS__PROBES_PER_ADDRESS__COUNT", "100000000"),
    ] {
        command = command.env(format!("STAMPEDE__{setting}"), value);
    }
    Ok(command)
}

fn write_report(report: &Report, directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("report.html"), report.html())?;
    std::fs::write(directory.join("rates.svg"), report.rates_svg())?;
    std::fs::write(directory.join("slowest.svg"), report.slowest_svg())?;
    std::fs::write(directory.join("report.json"), serde_json::to_string_pretty(report)?)?;
    Ok(())
}

/// The current phase and the rate, on standard error.
struct Bar {
    bar: ProgressBar,
}

impl Bar {
    fn start(clock: &Arc<RunClock>, quiet: bool) -> Self {
        if quiet || !std::io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden() };
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise}  {prefix:<12} {msg}") {
            bar.set_style(style);
        }
        let (shown, clock) = (bar.clone(), clock.clone());
        std::thread::spawn(move || {
            let (mut at, mut responses) = (Instant::now(), 0);
            while !shown.is_finished() {
                tick();
                let (now, all) = (Instant::now(), clock.responses.load(Ordering::Relaxed));
                #[expect(clippy::cast_precision_loss, reason = "responses of a quarter of a second")]
                let rate = (all - responses) as f64 / now.duration_since(at).as_secs_f64();
                (at, responses) = (now, all);
                shown.set_message(format!("{rate:>9.0} responses/s   {all} in total"));
                shown.tick();
            }
        });
        Self { bar }
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[expect(clippy::disallowed_methods, reason = "a separate thread that updates the display four times a second")]
fn tick() {
    std::thread::sleep(Duration::from_millis(250));
}

impl Progress for Bar {
    fn phase(&self, name: &str) {
        self.bar.set_prefix(name.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All requests of a load test come from one address.
    #[test]
    fn every_limit_per_address_is_raised() {
        let command = node_command("data".into(), "token", 1).unwrap().command(None);
        let raised: Vec<String> = command.get_envs().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        let defaults: toml::Table = include_str!("../../../config/default.toml").parse().unwrap();
        let mut found = 0;
        for (section, settings) in defaults.iter().filter_map(|(name, value)| Some((name, value.as_table()?))) {
            let of_addresses = |name: &str| name.contains("per_address") || name.contains("per_ipv6");
            for (name, value) in settings.iter().filter(|(name, _)| of_addresses(name)) {
                let count = if value.is_table() { "__COUNT" } else { "" };
                let setting = format!("STAMPEDE__{section}__{name}{count}").to_uppercase();
                assert!(raised.contains(&setting), "{setting} is not raised");
                found += 1;
            }
        }
        assert!(found >= 10, "{found} limits per address in the settings");
    }
}
