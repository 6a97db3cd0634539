//! Merges defaults, file, environment and flags into one value. An unknown setting is an error that names it.
//!
//! Each section has a struct with its settings, the check of their ranges, and what it makes of them for the crate that uses them.
//!
//! - [`flags`]: the settings that have a flag
//! - [`tier`]: `tier` and `ids`, `[shield]`, `[reconcile]`, and what a tier consists of; [`redis`], [`queue`], [`rabbitmq`]: its servers
//! - [`http`], [`admin`]: connections and administrators; [`buy`], [`orders`], [`payments`], [`login`], [`limits`]: buyers; [`cache`]: reads;
//!   [`events`]: the steps of orders for a receiver of the operator
//! - [`operation`]: `[alerts]` and `[log]`

mod admin;
mod buy;
mod cache;
mod events;
mod flags;
mod http;
mod limits;
mod login;
mod operation;
mod orders;
mod payments;
mod queue;
mod rabbitmq;
mod redis;
#[cfg(test)]
mod tests;
mod tier;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, anyhow, bail};
use config::{Config, ConfigError, Environment, File, FileFormat};
use serde::Deserialize;
use stampede_engine::{AlertConfig, Config as EngineConfig, IdConfig, PaymentConfig, SessionKeys, TierConfig};
use stampede_ledger::Database;
use stampede_tls::TlsFiles;

pub use self::admin::TokenSetting;
pub use self::flags::{Flags, ServeFlags};
use self::limits::Limit;
pub use self::login::{Login, SenderKind};
pub use self::operation::{Alerts, Log, LogFormat};
pub use self::queue::QueueKind;
pub use self::tier::Tier;
use crate::redact::without_credentials;

const DEFAULTS: &str = include_str!("../../../../config/default.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub tier: Tier,
    ids: tier::Ids,
    pub data_dir: PathBuf,
    database: String,
    pub listen: SocketAddr,
    admin_listen: String,
    pub allow_load_test: bool,
    redis: redis::Redis,
    queue: queue::Queue,
    rabbitmq: rabbitmq::RabbitMq,
    shield: tier::Shield,
    pub admin: admin::Admin,
    pub http: http::Http,
    pub buy: buy::Buy,
    orders: orders::Orders,
    pub payments: payments::Payments,
    pub events: events::Events,
    pub login: Login,
    pub limits: limits::Limits,
    cache: cache::Cache,
    reconcile: tier::Reconcile,
    pub alerts: Alerts,
    pub log: Log,
}

/// Merges defaults, file, environment and flags; later ones take precedence.
pub fn merge(flags: &Flags, serve: &ServeFlags) -> anyhow::Result<Config> {
    let mut builder = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml));
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
fn invalid(error: &ConfigError) -> anyhow::Error {
    anyhow!(without_credentials(&error.to_string())).context("invalid settings")
}

/// An error that names the first of these settings that is 0.
fn at_least_one(settings: &[(&str, u64)]) -> anyhow::Result<()> {
    match settings.iter().find(|(_, value)| *value == 0) {
        Some((name, _)) => bail!("invalid settings: {name} must be at least 1"),
        None => Ok(()),
    }
}

/// The files with which a client uses TLS. An empty setting names none.
fn tls_files(ca: &str, certificate: &str, key: &str) -> TlsFiles {
    let file = |path: &str| (!path.is_empty()).then(|| path.into());
    TlsFiles { ca: file(ca), certificate: file(certificate), key: file(key) }
}

impl Settings {
    pub fn load(flags: &Flags, serve: &ServeFlags) -> anyhow::Result<Self> {
        let settings: Self = merge(flags, serve)?.try_deserialize().map_err(|error| invalid(&error))?;
        settings.check()?;
        Ok(settings)
    }

    /// Checks the ranges in every section.
    fn check(&self) -> anyhow::Result<()> {
        self.redis.check()?;
        self.queue.check()?;
        self.rabbitmq.check()?;
        self.shield.check()?;
        self.admin.check()?;
        self.http.check()?;
        self.buy.check()?;
        self.orders.check()?;
        self.payments.check()?;
        self.events.check()?;
        self.login.check()?;
        self.limits.check()?;
        self.cache.check()?;
        self.reconcile.check()?;
        self.alerts.check()
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

    pub fn engine(
        &self,
        tier: TierConfig,
        ids: IdConfig,
        session_keys: Option<SessionKeys>,
        alerts: AlertConfig,
        payments: PaymentConfig,
        demo: bool,
    ) -> anyhow::Result<EngineConfig> {
        Ok(EngineConfig {
            answer_timeout: self.buy.answer_timeout(),
            payment_deadline_ms: self.orders.payment_deadline_ms,
            buy_again: self.orders.buy_again,
            payments,
            events: self.events.config()?,
            tier,
            ids,
            cache: self.cache.config(),
            alerts,
            auth: self.login.auth(session_keys, self.limits.memory, demo),
        })
    }
}
