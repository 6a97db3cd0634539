//! What the handlers share.

use std::fmt::Display;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::address::Network;
use crate::buy::BuyMetrics;
use crate::credentials::{AdminToken, Administrators};
use crate::metrics::HttpMetrics;
use crate::readiness::Readiness;
use crate::security_log::SecurityLog;
use axum::http::HeaderValue;
use metrics_exporter_prometheus::PrometheusHandle;
use stampede_core::UserId;
use stampede_engine::Engine;
use stampede_limit::{Counters, Limit, Limiter};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Clone)]
pub struct Config {
    /// Whether this process serves buyers, or only records orders.
    pub serves_buyers: bool,
    pub admin_tokens: Vec<AdminToken>,
    /// Limit of wrong administrator tokens per address.
    pub wrong_admin_tokens_per_address: Limit,
    /// Serve the routes for load tests.
    pub allow_load_test: bool,
    /// Proxies whose `X-Forwarded-For` is trusted.
    pub trusted_proxies: Vec<Network>,
    /// Whether responses have an HSTS header, so that browsers use HTTPS only.
    pub hsts: bool,
    /// Origins whose pages may call the buyers' routes.
    pub cors_origins: Vec<HeaderValue>,
    /// How long a response may take. An attempt to buy must be authenticated within this time; the engine's own timeout bounds the rest.
    pub answer_timeout: Duration,
    /// Attempts to buy per user.
    pub buy_per_user: Limit,
    /// Attempts to buy per address.
    pub buy_per_address: Limit,
    /// Login codes and logins per address.
    pub login_per_address: Limit,
    /// Reads of shops and sales per address.
    pub reads_per_address: Limit,
    /// Searches for shops by name per address, in addition to [`Config::reads_per_address`].
    pub searches_per_address: Limit,
    /// Concurrent searches for shops by name, over all addresses.
    pub searches_at_once: usize,
    /// Calls of `/readyz`, `/openapi.json` and `/docs` per address.
    pub probes_per_address: Limit,
    /// Requests about their own orders and sessions per user.
    pub own_per_user: Limit,
    /// How many users and addresses each limit remembers.
    pub limit_memory: usize,
}

/// Which routes a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    Buyers,
    Admin,
    Both,
    /// Health, readiness and metrics, of a process that serves nothing else.
    Probes,
}

impl Surface {
    pub(crate) const fn serves_buyers(self) -> bool {
        matches!(self, Self::Buyers | Self::Both)
    }

    pub(crate) const fn serves_administrators(self) -> bool {
        matches!(self, Self::Admin | Self::Both)
    }

    pub(crate) const fn serves_metrics(self) -> bool {
        !matches!(self, Self::Buyers)
    }
}

/// Rate limits. Every route that is not for administrators has one.
#[derive(Debug)]
pub(crate) struct Limits {
    pub(crate) buy_per_user: Limiter<UserId>,
    pub(crate) buy_per_address: Limiter<IpAddr>,
    pub(crate) login_per_address: Limiter<IpAddr>,
    pub(crate) reads_per_address: Limiter<IpAddr>,
    pub(crate) searches_per_address: Limiter<IpAddr>,
    pub(crate) probes_per_address: Limiter<IpAddr>,
    pub(crate) own_per_user: Limiter<UserId>,
}

/// What a limit let pass without deciding as it should.
pub(crate) struct LimitStats {
    pub(crate) limit: &'static str,
    /// Not counted, because the limit's memory was full.
    pub(crate) let_through: u64,
    /// Counted by this node alone, because Redis did not answer.
    pub(crate) fallbacks: u64,
}

impl Limits {
    fn new(config: &Config, counters: &Counters) -> Self {
        let by_user = |name, limit| Limiter::approximate(counters, name, limit, config.limit_memory);
        let by_ip = |name, limit| Limiter::approximate(counters, name, limit, config.limit_memory);
        // Exact: it limits attempts to guess.
        let login_per_address =
            Limiter::new(counters, "login_per_address", config.login_per_address, config.limit_memory);
        Self {
            buy_per_user: by_user("buy_per_user", config.buy_per_user),
            buy_per_address: by_ip("buy_per_address", config.buy_per_address),
            login_per_address,
            reads_per_address: by_ip("reads_per_address", config.reads_per_address),
            searches_per_address: by_ip("searches_per_address", config.searches_per_address),
            probes_per_address: by_ip("probes_per_address", config.probes_per_address),
            own_per_user: by_user("own_per_user", config.own_per_user),
        }
    }

    pub(crate) fn stats(&self) -> [LimitStats; 7] {
        [
            stats("buy_per_user", &self.buy_per_user),
            stats("buy_per_address", &self.buy_per_address),
            stats("login_per_address", &self.login_per_address),
            stats("reads_per_address", &self.reads_per_address),
            stats("searches_per_address", &self.searches_per_address),
            stats("probes_per_address", &self.probes_per_address),
            stats("own_per_user", &self.own_per_user),
        ]
    }
}

fn stats<K: Eq + Hash + Clone + Display>(limit: &'static str, limiter: &Limiter<K>) -> LimitStats {
    LimitStats { limit, let_through: limiter.let_through(), fallbacks: limiter.fallbacks() }
}

#[derive(Debug)]
pub struct App {
    pub(crate) engine: Arc<Engine>,
    pub(crate) config: Config,
    pub(crate) metrics: PrometheusHandle,
    pub(crate) buy_metrics: BuyMetrics,
    pub(crate) http_metrics: HttpMetrics,
    pub(crate) limits: Limits,
    pub(crate) administrators: Administrators,
    pub(crate) security_log: SecurityLog,
    /// A permit per concurrent search for shops by name.
    pub(crate) searches: Semaphore,
    pub(crate) readiness: Readiness,
    draining: CancellationToken,
}

impl App {
    pub fn new(engine: Arc<Engine>, config: Config, metrics: PrometheusHandle) -> Self {
        let limits = Limits::new(&config, engine.limit_counters());
        let (buy_metrics, http_metrics) = (BuyMetrics::new(), HttpMetrics::new());
        let tokens = config.admin_tokens.clone();
        let administrators = Administrators::new(tokens, config.wrong_admin_tokens_per_address, config.limit_memory);
        Self {
            searches: Semaphore::new(config.searches_at_once),
            readiness: Readiness::default(),
            security_log: SecurityLog::new(),
            draining: CancellationToken::new(),
            engine,
            config,
            metrics,
            buy_metrics,
            http_metrics,
            limits,
            administrators,
        }
    }

    /// Replaces the tokens of all administrators.
    pub fn replace_admin_tokens(&self, tokens: Vec<AdminToken>) {
        self.administrators.replace(tokens);
    }

    /// Makes `/readyz` respond with 503, so that load balancers send no new requests, and ends the streams of events.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    pub(crate) const fn draining(&self) -> &CancellationToken {
        &self.draining
    }
}
