//! Merges defaults, file, environment and flags into one value. An unknown setting is an error that names it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::{Args, ValueEnum};
use config::{Environment, File, FileFormat};
use serde::Deserialize;
use stampede_core::Phone;
use stampede_engine::{
    AlertConfig, AnswerAfter, AuthConfig, CacheConfig, Config as EngineConfig, IdConfig, QueueConfig, QueuedConfig,
    RabbitMqConfig, ReconcileConfig, RedisTierConfig, SendBudgets, SessionKeys, ShieldConfig, SoloConfig, StreamConfig,
    TierConfig, Transport,
};
use stampede_http::tls::Certificate;
use stampede_http::{HeaderValue, Network, Role, ServerConfig};
use stampede_ledger::Database;
use stampede_queue::rabbitmq;
use stampede_redis::{Client, Servers, Tls, TlsFiles};

use crate::redact::{SecretUrl, without_credentials};

const DEFAULTS: &str = include_str!("../../../config/default.toml");

const DAY_MS: u64 = 24 * 3600 * 1000;

/// The settings file, and the settings that have a flag.
#[derive(Debug, Args)]
pub struct Flags {
    /// A TOML file with settings
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The ledger: sqlite:PATH, mysql://USER@HOST/NAME or postgres://USER@HOST/NAME [default: sqlite:DATA_DIR/stampede.db]
    #[arg(long, value_name = "URL")]
    database: Option<String>,

    /// Directory of the embedded database and the admin token [default: data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

impl Flags {
    /// Whether any flag selects a database.
    pub fn names_database(&self) -> bool {
        self.config.is_some() || self.database.is_some() || self.data_dir.is_some()
    }
}

/// Flags of `serve` only.
#[derive(Debug, Default, Args)]
pub struct ServeFlags {
    /// The tier: solo, one process; shared, several nodes with a gate in Redis; or queued, the same with a queue in front of the
    /// database [default: solo]
    #[arg(long, value_name = "TIER")]
    tier: Option<String>,

    /// The queue of the tiers queued and shielded: redis-stream, or rabbitmq, which needs --amqp [default: redis-stream]
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The Redis server of the gate, for the tiers shared and queued: redis://USER:PASSWORD@HOST:PORT/DATABASE, or rediss:// for TLS
    #[arg(long, value_name = "URL")]
    redis: Option<String>,

    /// The RabbitMQ of the queue: amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS
    #[arg(long, value_name = "URL")]
    amqp: Option<String>,

    /// The address for buyers [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,

    /// A separate address for /admin and /metrics [default: the same as --listen]
    #[arg(long, value_name = "ADDR")]
    admin_listen: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    Solo,
    Shared,
    Queued,
    Shielded,
}

impl Tier {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Solo => "solo",
            Self::Shared => "shared",
            Self::Queued => "queued",
            Self::Shielded => "shielded",
        }
    }

    /// Whether a queue is in front of the database.
    pub const fn has_queue(self) -> bool {
        matches!(self, Self::Queued | Self::Shielded)
    }

    /// Whether the gate is in Redis.
    pub const fn has_redis(self) -> bool {
        matches!(self, Self::Shared | Self::Queued | Self::Shielded)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum QueueKind {
    RedisStream,
    #[serde(rename = "rabbitmq")]
    #[value(name = "rabbitmq")]
    RabbitMq,
}

impl QueueKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RedisStream => "redis-stream",
            Self::RabbitMq => "rabbitmq",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum QueueTypeSetting {
    Classic,
    Quorum,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum AnswerAfterSetting {
    Queue,
    Ledger,
}

impl From<AnswerAfterSetting> for AnswerAfter {
    fn from(setting: AnswerAfterSetting) -> Self {
        match setting {
            AnswerAfterSetting::Queue => Self::Queue,
            AnswerAfterSetting::Ledger => Self::Ledger,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ids {
    Snowflake,
    Redis,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SenderKind {
    None,
    Console,
    Webhook,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    count: u32,
    window_ms: u64,
}

impl From<Limit> for stampede_limit::Limit {
    fn from(limit: Limit) -> Self {
        Self { count: limit.count, window: Duration::from_millis(limit.window_ms) }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub tier: Tier,
    ids: Ids,
    pub data_dir: PathBuf,
    database: String,
    pub listen: SocketAddr,
    admin_listen: String,
    pub allow_load_test: bool,
    redis: Redis,
    queue: Queue,
    rabbitmq: RabbitMqSettings,
    shield: Shield,
    pub admin: Admin,
    http: Http,
    pub buy: Buy,
    pub login: Login,
    pub limits: Limits,
    cache: CacheSettings,
    reconcile: Reconcile,
    pub alerts: Alerts,
    pub log: Log,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Redis {
    url: SecretUrl,
    tls_ca: String,
    tls_certificate: String,
    tls_key: String,
    assume_noeviction: bool,
    connect_timeout_ms: u64,
    response_timeout_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    kind: QueueKind,
    answer_after: AnswerAfterSetting,
    accept_within_ms: u64,
    consume: bool,
    allow_without_aof: bool,
    max_batches: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RabbitMqSettings {
    url: SecretUrl,
    tls_ca: String,
    tls_certificate: String,
    tls_key: String,
    partitions: u16,
    queue_type: QueueTypeSetting,
    mandatory: bool,
    prefetch: u16,
    max_in_flight: usize,
    connect_timeout_ms: u64,
    heartbeat_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shield {
    expiry_ms: u64,
    max_buyers: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    token_file: String,
    tokens: BTreeMap<String, TokenSetting>,
    pub wrong_tokens_per_address: Limit,
}

/// An additional administrator.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenSetting {
    pub role: RoleSetting,
    pub file: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleSetting {
    Viewer,
    Operator,
}

impl From<RoleSetting> for Role {
    fn from(role: RoleSetting) -> Self {
        match role {
            RoleSetting::Viewer => Self::Viewer,
            RoleSetting::Operator => Self::Operator,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Http {
    max_connections: usize,
    max_connections_per_address: usize,
    head_timeout_ms: u64,
    answer_timeout_ms: u64,
    drain_timeout_ms: u64,
    trusted_proxies: Vec<String>,
    tls_certificate: String,
    tls_key: String,
    hsts: bool,
    cors_origins: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buy {
    answer_timeout_ms: u64,
    max_batch: usize,
    queue_per_sale: usize,
    queue_total: usize,
    quarantine_after_ms: u64,
    pub per_user: Limit,
    pub per_address: Limit,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Login {
    pub sender: SenderKind,
    pub webhook_url: SecretUrl,
    pub webhook_secret_file: String,
    session_ttl_ms: u64,
    session_lifetime_ms: u64,
    sessions_per_user: usize,
    session_memory: u64,
    pub session_key_file: String,
    code_ttl_ms: u64,
    code_tries: u32,
    codes_per_phone: Limit,
    codes_per_phone_day: Limit,
    codes_per_address: Limit,
    codes_per_ipv6_56: Limit,
    codes_per_ipv6_48: Limit,
    codes_per_shop: Limit,
    proof_of_work_bits: u8,
    pub per_address: Limit,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    pub reads_per_address: Limit,
    pub searches_per_address: Limit,
    pub searches_at_once: usize,
    pub probes_per_address: Limit,
    pub own_per_user: Limit,
    pub memory: usize,
    redis_timeout_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheSettings {
    ttl_ms: u64,
    refresh_after_ms: u64,
    empty_ttl_ms: u64,
    local_ttl_ms: u64,
    jitter: f64,
    max_entries: u64,
    filter_rebuild_ms: u64,
    redis_timeout_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reconcile {
    interval_ms: u64,
    confirm_after_ms: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alerts {
    pub webhook_url: SecretUrl,
    pub webhook_secret_file: String,
    phones: Vec<String>,
    repeat_after_ms: u64,
}

impl Alerts {
    pub fn phones(&self) -> anyhow::Result<Vec<Phone>> {
        let parse = |text: &String| Phone::parse(text).map_err(|_| anyhow!("alerts.phones: {text:?} is not a number"));
        self.phones.iter().map(parse).collect()
    }

    pub const fn repeat_after(&self) -> Duration {
        Duration::from_millis(self.repeat_after_ms)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    pub level: String,
    pub format: LogFormat,
}

/// Merges defaults, file, environment and flags; later ones take precedence.
pub fn merge(flags: &Flags, serve: &ServeFlags) -> anyhow::Result<config::Config> {
    let mut builder = config::Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml));
    if let Some(path) = &flags.config {
        builder = builder.add_source(File::from(path.as_path()).format(FileFormat::Toml));
    }
    let environment = Environment::with_prefix("STAMPEDE").prefix_separator("__").separator("__").try_parsing(true);
    builder = builder.add_source(environment);
    let given = [
        ("database", flags.database.clone()),
        ("data_dir", flags.data_dir.as_deref().map(|path| path.display().to_string())),
        ("tier", serve.tier.clone()),
        ("queue.kind", serve.queue.clone()),
        ("redis.url", serve.redis.clone()),
        ("rabbitmq.url", serve.amqp.clone()),
        ("listen", serve.listen.clone()),
        ("admin_listen", serve.admin_listen.clone()),
    ];
    for (setting, value) in given {
        builder = builder.set_override_option(setting, value)?;
    }
    builder.build().map_err(|error| invalid(&error))
}

/// The message may quote a line of the file, so credentials are removed.
fn invalid(error: &config::ConfigError) -> anyhow::Error {
    anyhow!(without_credentials(&error.to_string())).context("invalid settings")
}

impl Settings {
    pub fn load(flags: &Flags, serve: &ServeFlags) -> anyhow::Result<Self> {
        let settings: Self = merge(flags, serve)?.try_deserialize().map_err(|error| invalid(&error))?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> anyhow::Result<()> {
        let at_least_one = [
            ("redis.connect_timeout_ms", self.redis.connect_timeout_ms),
            ("redis.response_timeout_ms", self.redis.response_timeout_ms),
            ("queue.accept_within_ms", self.queue.accept_within_ms),
            ("shield.expiry_ms", self.shield.expiry_ms),
            ("shield.max_buyers", self.shield.max_buyers.into()),
            ("rabbitmq.partitions", self.rabbitmq.partitions.into()),
            ("rabbitmq.prefetch", self.rabbitmq.prefetch.into()),
            ("rabbitmq.max_in_flight", self.rabbitmq.max_in_flight as u64),
            ("rabbitmq.connect_timeout_ms", self.rabbitmq.connect_timeout_ms),
            ("queue.max_batches", self.queue.max_batches.into()),
            ("http.max_connections", self.http.max_connections as u64),
            ("http.max_connections_per_address", self.http.max_connections_per_address as u64),
            ("http.head_timeout_ms", self.http.head_timeout_ms),
            ("http.answer_timeout_ms", self.http.answer_timeout_ms),
            ("buy.answer_timeout_ms", self.buy.answer_timeout_ms),
            ("buy.max_batch", self.buy.max_batch as u64),
            ("buy.queue_per_sale", self.buy.queue_per_sale as u64),
            ("buy.queue_total", self.buy.queue_total as u64),
            ("admin.wrong_tokens_per_address.count", self.admin.wrong_tokens_per_address.count.into()),
            ("admin.wrong_tokens_per_address.window_ms", self.admin.wrong_tokens_per_address.window_ms),
            ("buy.per_user.window_ms", self.buy.per_user.window_ms),
            ("buy.per_address.window_ms", self.buy.per_address.window_ms),
            ("login.session_ttl_ms", self.login.session_ttl_ms),
            ("login.session_lifetime_ms", self.login.session_lifetime_ms),
            ("login.sessions_per_user", self.login.sessions_per_user as u64),
            ("login.session_memory", self.login.session_memory),
            ("login.code_ttl_ms", self.login.code_ttl_ms),
            ("login.codes_per_phone.window_ms", self.login.codes_per_phone.window_ms),
            ("login.codes_per_phone_day.window_ms", self.login.codes_per_phone_day.window_ms),
            ("login.codes_per_address.window_ms", self.login.codes_per_address.window_ms),
            ("login.codes_per_ipv6_56.window_ms", self.login.codes_per_ipv6_56.window_ms),
            ("login.codes_per_ipv6_48.window_ms", self.login.codes_per_ipv6_48.window_ms),
            ("login.codes_per_shop.window_ms", self.login.codes_per_shop.window_ms),
            ("login.per_address.window_ms", self.login.per_address.window_ms),
            ("limits.reads_per_address.window_ms", self.limits.reads_per_address.window_ms),
            ("limits.searches_per_address.window_ms", self.limits.searches_per_address.window_ms),
            ("limits.searches_at_once", self.limits.searches_at_once as u64),
            ("limits.probes_per_address.window_ms", self.limits.probes_per_address.window_ms),
            ("limits.own_per_user.window_ms", self.limits.own_per_user.window_ms),
            ("limits.redis_timeout_ms", self.limits.redis_timeout_ms),
            ("reconcile.interval_ms", self.reconcile.interval_ms),
            ("reconcile.confirm_after_ms", self.reconcile.confirm_after_ms),
            ("alerts.repeat_after_ms", self.alerts.repeat_after_ms),
            ("cache.ttl_ms", self.cache.ttl_ms),
            ("cache.refresh_after_ms", self.cache.refresh_after_ms),
            ("cache.empty_ttl_ms", self.cache.empty_ttl_ms),
            ("cache.local_ttl_ms", self.cache.local_ttl_ms),
            ("cache.max_entries", self.cache.max_entries),
            ("cache.filter_rebuild_ms", self.cache.filter_rebuild_ms),
            ("cache.redis_timeout_ms", self.cache.redis_timeout_ms),
        ];
        if self.buy.max_batch > 4096 {
            bail!("invalid settings: buy.max_batch must be at most 4096");
        }
        if self.rabbitmq.partitions > rabbitmq::MAX_PARTITIONS {
            bail!("invalid settings: rabbitmq.partitions must be at most {}", rabbitmq::MAX_PARTITIONS);
        }
        if self.rabbitmq.heartbeat_ms < 1000 {
            bail!("invalid settings: rabbitmq.heartbeat_ms must be at least 1000");
        }
        if self.login.code_ttl_ms > DAY_MS {
            bail!("invalid settings: login.code_ttl_ms must be at most {DAY_MS}");
        }
        if self.login.proof_of_work_bits > 32 {
            bail!("invalid settings: login.proof_of_work_bits must be at most 32");
        }
        if !(0.0..=1.0).contains(&self.cache.jitter) {
            bail!("invalid settings: cache.jitter must be between 0 and 1");
        }
        if self.cache.refresh_after_ms > self.cache.ttl_ms {
            bail!("invalid settings: cache.refresh_after_ms must be at most cache.ttl_ms");
        }
        if let Some((name, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            bail!("invalid settings: {name} must be at least 1");
        }
        Ok(())
    }

    pub fn database(&self) -> anyhow::Result<Database> {
        if self.database.is_empty() {
            return Ok(Database::Sqlite(self.data_dir.join("stampede.db")));
        }
        Ok(Database::parse(&self.database)?)
    }

    pub fn admin_listen(&self) -> anyhow::Result<Option<SocketAddr>> {
        if self.admin_listen.is_empty() {
            return Ok(None);
        }
        let address = self.admin_listen.parse();
        Ok(Some(address.with_context(|| format!("admin_listen: {:?} is not an address", self.admin_listen))?))
    }

    pub fn admin_token_file(&self) -> Option<&Path> {
        (!self.admin.token_file.is_empty()).then(|| Path::new(&self.admin.token_file))
    }

    /// The additional administrators, by name.
    pub fn admin_tokens(&self) -> &BTreeMap<String, TokenSetting> {
        &self.admin.tokens
    }

    pub fn trusted_proxies(&self) -> anyhow::Result<Vec<Network>> {
        let parse = |text: &String| {
            text.parse().map_err(|_| anyhow!("http.trusted_proxies: {text:?} is not a network such as 10.0.0.0/8"))
        };
        self.http.trusted_proxies.iter().map(parse).collect()
    }

    /// The files of the certificate and of its key; `None` without TLS.
    pub fn tls_files(&self) -> anyhow::Result<Option<(&Path, &Path)>> {
        match (self.http.tls_certificate.as_str(), self.http.tls_key.as_str()) {
            ("", "") => Ok(None),
            ("", _) | (_, "") => bail!("http.tls_certificate and http.tls_key must be set together or not at all"),
            (certificate, key) => Ok(Some((Path::new(certificate), Path::new(key)))),
        }
    }

    /// Reads the certificate, if there is one.
    pub fn certificate(&self) -> anyhow::Result<Option<Arc<Certificate>>> {
        Ok(self.tls_files()?.map(|(certificate, key)| Certificate::read(certificate, key)).transpose()?)
    }

    /// Whether responses have the header that makes browsers use HTTPS only: always with TLS.
    pub fn hsts(&self) -> bool {
        self.http.hsts || !self.http.tls_certificate.is_empty()
    }

    pub fn cors_origins(&self) -> anyhow::Result<Vec<HeaderValue>> {
        let origin = |text: &String| {
            let good = text.split_once("://").is_some_and(|(scheme, host)| {
                matches!(scheme, "http" | "https") && !host.is_empty() && !host.contains(['/', ' '])
            });
            let value = HeaderValue::try_from(text).ok().filter(|_| good);
            value.ok_or_else(|| anyhow!("http.cors_origins: {text:?} is not an origin such as https://shop.example"))
        };
        self.http.cors_origins.iter().map(origin).collect()
    }

    pub const fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.http.answer_timeout_ms)
    }

    pub fn server(&self, certificate: Option<&Arc<Certificate>>) -> anyhow::Result<ServerConfig> {
        Ok(ServerConfig {
            tls: certificate.map(Certificate::acceptor).transpose()?,
            max_connections: self.http.max_connections,
            max_connections_per_address: self.http.max_connections_per_address,
            head_timeout: Duration::from_millis(self.http.head_timeout_ms),
            drain_timeout: Duration::from_millis(self.http.drain_timeout_ms),
        })
    }

    fn redis_servers(&self) -> anyhow::Result<Servers> {
        let servers = Servers::from(self.redis.url.expose());
        Ok(match self.redis_tls()? {
            Some(tls) => servers.with_tls(tls),
            None => servers,
        })
    }

    const fn redis_timeouts(&self) -> (Duration, Duration) {
        let Redis { connect_timeout_ms, response_timeout_ms, .. } = self.redis;
        (Duration::from_millis(connect_timeout_ms), Duration::from_millis(response_timeout_ms))
    }

    /// A client of Redis. Nothing is sent.
    fn redis(&self) -> anyhow::Result<Arc<Client>> {
        let (url, servers, (connect, response)) = (&self.redis.url, self.redis_servers()?, self.redis_timeouts());
        let client = Client::new(servers, connect, response).map_err(|error| {
            // The detail of an error may quote the URL with its password.
            let reason = if error.detail().is_none() { format!(" ({error})") } else { String::new() };
            anyhow!(
                "redis.url: {url} is not a URL such as redis://127.0.0.1:6379/0 or rediss://127.0.0.1:6379/0{reason}"
            )
        })?;
        Ok(Arc::new(client))
    }

    /// Reads the certificates for Redis, if there are any.
    fn redis_tls(&self) -> anyhow::Result<Option<Tls>> {
        let Redis { url, tls_ca, tls_certificate, tls_key, .. } = &self.redis;
        if tls_certificate.is_empty() != tls_key.is_empty() {
            bail!("redis.tls_certificate and redis.tls_key must be set together or not at all");
        }
        let file = |path: &str| (!path.is_empty()).then(|| path.into());
        let files = TlsFiles { ca: file(tls_ca), certificate: file(tls_certificate), key: file(tls_key) };
        if files == TlsFiles::default() {
            return Ok(None);
        }
        if !url.expose().starts_with("rediss://") {
            bail!("redis.tls_ca, redis.tls_certificate and redis.tls_key need a redis.url that begins with rediss://");
        }
        Ok(Some(files.read().context("the TLS files of [redis]")?))
    }

    /// The tier and its settings.
    pub fn tier(&self, database: &Database) -> anyhow::Result<TierConfig> {
        let Buy { max_batch, queue_per_sale, queue_total, quarantine_after_ms, .. } = self.buy;
        let quarantine_after = Duration::from_millis(quarantine_after_ms);
        let is_embedded = matches!(database, Database::Sqlite(_));
        match self.tier {
            Tier::Solo => {
                // This process holds the lock of an embedded database.
                let shared_ledger = !is_embedded;
                Ok(TierConfig::Solo(SoloConfig {
                    shared_ledger,
                    max_batch,
                    queue_per_sale,
                    queue_total,
                    quarantine_after,
                }))
            }
            Tier::Shared | Tier::Queued | Tier::Shielded if is_embedded => bail!(
                "the tier {} has several nodes, and SQLite belongs to one process: set --database to mysql://… or postgres://…",
                self.tier.as_str()
            ),
            Tier::Shared | Tier::Queued | Tier::Shielded if self.redis.url.expose().is_empty() => {
                bail!(
                    "the tier {} has its gate in Redis: set --redis, such as redis://127.0.0.1:6379",
                    self.tier.as_str()
                )
            }
            Tier::Shared => Ok(TierConfig::Shared(self.redis_tier()?)),
            Tier::Queued | Tier::Shielded => {
                let Shield { expiry_ms, max_buyers } = self.shield;
                let shield = ShieldConfig { expiry: Duration::from_millis(expiry_ms), max_buyers };
                let shield = (self.tier == Tier::Shielded).then_some(shield);
                let (redis, queue, transport) = (self.redis_tier()?, self.queue(), self.transport()?);
                Ok(TierConfig::Queued(QueuedConfig { redis, queue, transport, shield }))
            }
        }
    }

    fn redis_tier(&self) -> anyhow::Result<RedisTierConfig> {
        let Buy { max_batch, queue_per_sale, queue_total, quarantine_after_ms, .. } = self.buy;
        let (connect_timeout, response_timeout) = self.redis_timeouts();
        Ok(RedisTierConfig {
            redis: self.redis()?,
            limit_redis: self.redis()?,
            limit_timeout: Duration::from_millis(self.limits.redis_timeout_ms),
            servers: self.redis_servers()?,
            connect_timeout,
            response_timeout,
            assume_noeviction: self.redis.assume_noeviction,
            max_batch,
            queue_per_sale,
            queue_total,
            quarantine_after: Duration::from_millis(quarantine_after_ms),
            reconcile: ReconcileConfig {
                interval: Duration::from_millis(self.reconcile.interval_ms),
                confirm_after: Duration::from_millis(self.reconcile.confirm_after_ms),
            },
        })
    }

    fn queue(&self) -> QueueConfig {
        let Queue { answer_after, accept_within_ms, consume, max_batches, .. } = self.queue;
        QueueConfig {
            accept_within: Duration::from_millis(accept_within_ms),
            answer_after: answer_after.into(),
            consume,
            max_batches,
        }
    }

    fn transport(&self) -> anyhow::Result<Transport> {
        match self.queue.kind {
            QueueKind::RedisStream => {
                let allow_without_aof = self.queue.allow_without_aof;
                Ok(Transport::RedisStream(StreamConfig { redis: self.redis()?, allow_without_aof }))
            }
            QueueKind::RabbitMq => Ok(Transport::RabbitMq(Box::new(self.rabbitmq()?))),
        }
    }

    /// Nothing is sent.
    fn rabbitmq(&self) -> anyhow::Result<RabbitMqConfig> {
        let RabbitMqSettings { url, partitions, queue_type, mandatory, prefetch, max_in_flight, .. } = &self.rabbitmq;
        if url.expose().is_empty() {
            bail!("queue.kind = \"rabbitmq\" needs a broker: set --amqp, such as amqp://127.0.0.1:5672");
        }
        // The error does not repeat the URL.
        let address = url.expose().parse().context("rabbitmq.url")?;
        let broker = rabbitmq::Config {
            tls: self.rabbitmq_tls()?,
            partitions: *partitions,
            queue_type: match queue_type {
                QueueTypeSetting::Classic => rabbitmq::QueueType::Classic,
                QueueTypeSetting::Quorum => rabbitmq::QueueType::Quorum,
            },
            mandatory: *mandatory,
            max_in_flight: *max_in_flight,
            connect_timeout: Duration::from_millis(self.rabbitmq.connect_timeout_ms),
            // A later confirm is of no use.
            confirm_timeout: Duration::from_millis(self.queue.accept_within_ms),
            heartbeat: Duration::from_millis(self.rabbitmq.heartbeat_ms),
            ..rabbitmq::Config::new(address, "")
        };
        Ok(RabbitMqConfig { broker, prefetch: *prefetch })
    }

    /// Reads the certificates for RabbitMQ; `None` without TLS.
    fn rabbitmq_tls(&self) -> anyhow::Result<Option<rabbitmq::Tls>> {
        let RabbitMqSettings { url, tls_ca, tls_certificate, tls_key, .. } = &self.rabbitmq;
        let file = |path: &str| (!path.is_empty()).then(|| path.into());
        let files = rabbitmq::TlsFiles { ca: file(tls_ca), certificate: file(tls_certificate), key: file(tls_key) };
        if url.expose().starts_with("amqps://") {
            return Ok(Some(files.read().context("the TLS files of [rabbitmq]")?));
        }
        if files != rabbitmq::TlsFiles::default() {
            bail!(
                "rabbitmq.tls_ca, rabbitmq.tls_certificate and rabbitmq.tls_key need a rabbitmq.url that begins with amqps://"
            );
        }
        Ok(None)
    }

    /// The settings of a process that records orders and serves no buyers.
    pub fn for_worker(mut self) -> anyhow::Result<Self> {
        if !self.tier.has_queue() {
            bail!(
                "only the tiers queued and shielded have a queue; this is the tier {}: set --tier queued",
                self.tier.as_str()
            );
        }
        self.queue.consume = true;
        Ok(self)
    }

    const fn cache(&self) -> CacheConfig {
        let cache = &self.cache;
        CacheConfig {
            ttl: Duration::from_millis(cache.ttl_ms),
            refresh_after: Duration::from_millis(cache.refresh_after_ms),
            empty_ttl: Duration::from_millis(cache.empty_ttl_ms),
            local_ttl: Duration::from_millis(cache.local_ttl_ms),
            jitter: cache.jitter,
            max_entries: cache.max_entries,
            filter_rebuild_interval: Duration::from_millis(cache.filter_rebuild_ms),
            redis_timeout: Duration::from_millis(cache.redis_timeout_ms),
        }
    }

    /// How ids are made.
    pub fn ids(&self, tier: &TierConfig) -> anyhow::Result<IdConfig> {
        match (self.ids, tier) {
            (Ids::Snowflake, _) => Ok(IdConfig::Snowflake),
            (Ids::Redis, TierConfig::Shared(tier)) => Ok(IdConfig::Redis(tier.redis.clone())),
            (Ids::Redis, TierConfig::Queued(queued)) => Ok(IdConfig::Redis(queued.redis.redis.clone())),
            (Ids::Redis, TierConfig::Solo(_)) if self.redis.url.expose().is_empty() => {
                bail!("ids = \"redis\" needs a Redis: set --redis, such as redis://127.0.0.1:6379")
            }
            (Ids::Redis, TierConfig::Solo(_)) => Ok(IdConfig::Redis(self.redis()?)),
        }
    }

    pub fn engine(
        &self,
        tier: TierConfig,
        ids: IdConfig,
        session_keys: Option<SessionKeys>,
        alerts: AlertConfig,
        demo: bool,
    ) -> EngineConfig {
        let (buy, login) = (&self.buy, &self.login);
        EngineConfig {
            answer_timeout: Duration::from_millis(buy.answer_timeout_ms),
            tier,
            ids,
            cache: self.cache(),
            alerts,
            auth: AuthConfig {
                session_ttl: Duration::from_millis(login.session_ttl_ms),
                session_lifetime: Duration::from_millis(login.session_lifetime_ms),
                max_sessions: login.sessions_per_user,
                session_memory: login.session_memory,
                session_keys,
                code_ttl: Duration::from_millis(login.code_ttl_ms),
                code_tries: login.code_tries,
                budgets: SendBudgets {
                    per_phone: login.codes_per_phone.into(),
                    per_phone_day: login.codes_per_phone_day.into(),
                    per_address: login.codes_per_address.into(),
                    per_ipv6_56: login.codes_per_ipv6_56.into(),
                    per_ipv6_48: login.codes_per_ipv6_48.into(),
                    per_shop: login.codes_per_shop.into(),
                    memory: self.limits.memory,
                },
                proof_of_work_bits: login.proof_of_work_bits,
                show_codes: demo,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> (tempfile::NamedTempFile, Flags) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        let config = Some(file.path().to_owned());
        (file, Flags { config, database: None, data_dir: None })
    }

    #[test]
    fn defaults_are_complete() {
        let settings =
            Settings::load(&Flags { config: None, database: None, data_dir: None }, &ServeFlags::default()).unwrap();
        assert_eq!(settings.database().unwrap().to_string(), "sqlite:data/stampede.db");
        assert_eq!(settings.admin_listen().unwrap(), None);
    }

    #[test]
    fn flags_override_the_file_and_the_file_overrides_defaults() {
        let (_file, mut flags) = file("listen = \"127.0.0.1:1\"\n[buy]\nmax_batch = 7\n");
        flags.data_dir = Some("elsewhere".into());
        let serve = ServeFlags { listen: Some("127.0.0.1:2".into()), ..ServeFlags::default() };
        let settings = Settings::load(&flags, &serve).unwrap();
        assert_eq!(settings.listen.port(), 2);
        assert_eq!(settings.buy.max_batch, 7);
        assert_eq!(settings.database().unwrap().to_string(), "sqlite:elsewhere/stampede.db");
    }

    #[test]
    fn invalid_setting_is_named() {
        for (text, name) in [
            ("lisen = \"127.0.0.1:1\"\n", "lisen"),
            ("[buy]\nmax_bach = 7\n", "max_bach"),
            ("[buy]\nper_user = { count = 1, window = 2 }\n", "window"),
            ("[buy]\nmax_batch = \"many\"\n", "max_batch"),
            ("[buy]\nmax_batch = 0\n", "buy.max_batch"),
            ("tier = \"huge\"\n", "huge"),
            ("ids = \"uuid\"\n", "uuid"),
            ("[cache]\njitter = 1.5\n", "cache.jitter"),
            ("[cache]\nttl_ms = 1000\n", "cache.refresh_after_ms"),
        ] {
            let (_file, flags) = file(text);
            let error = format!("{:#}", Settings::load(&flags, &ServeFlags::default()).unwrap_err());
            assert!(error.contains(name), "{text}: {error}");
        }
    }
}
