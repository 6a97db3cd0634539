//! What the handlers share, and the routes.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::address::Network;
use crate::credentials::{AdminToken, Administrators};
use crate::figures::HttpMetrics;
use crate::orders::BuyMetrics;
use crate::problem::Problem;
use crate::readiness::Readiness;
use crate::security_log::SecurityLog;
use crate::{openapi, page};
use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;
use stampede_core::{Code, UserId};
use stampede_engine::Engine;
use stampede_limit::{Limit, SlidingWindow};
use tokio::sync::Semaphore;

#[derive(Debug, Clone)]
pub struct Config {
    pub admin_tokens: Vec<AdminToken>,
    /// Wrong administrator tokens per address.
    pub wrong_admin_tokens_per_ip: Limit,
    /// Serve the routes for load tests.
    pub allow_load_test: bool,
    /// Whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<Network>,
    /// Tries to buy per person.
    pub buys_per_user: Limit,
    /// Tries to buy per address.
    pub buys_per_ip: Limit,
    /// Login codes and logins per address.
    pub logins_per_ip: Limit,
    /// Looks at shops and sales per address.
    pub reads_per_ip: Limit,
    /// Searches for shops by name per address, beside [`Config::reads_per_ip`].
    pub searches_per_ip: Limit,
    /// Searches for shops by name under way at once, of all addresses.
    pub searches_at_once: usize,
    /// Calls of `/readyz`, `/openapi.json` and `/docs` per address.
    pub probes_per_ip: Limit,
    /// Calls about one's own orders and sessions per person.
    pub own_per_user: Limit,
    /// How many people and addresses the limits remember.
    pub limit_memory: usize,
}

/// Which routes a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    Buyers,
    Admin,
    Both,
}

/// Every route that is not for administrators has one of these.
#[derive(Debug)]
pub(crate) struct Limits {
    pub(crate) buys_per_user: SlidingWindow<UserId>,
    pub(crate) buys_per_ip: SlidingWindow<IpAddr>,
    pub(crate) logins_per_ip: SlidingWindow<IpAddr>,
    pub(crate) reads_per_ip: SlidingWindow<IpAddr>,
    pub(crate) searches_per_ip: SlidingWindow<IpAddr>,
    pub(crate) probes_per_ip: SlidingWindow<IpAddr>,
    pub(crate) own_per_user: SlidingWindow<UserId>,
}

impl Limits {
    /// How many requests each limit let through uncounted, because its memory was full.
    pub(crate) fn let_through(&self) -> [(&'static str, u64); 7] {
        [
            ("buys_per_user", self.buys_per_user.let_through()),
            ("buys_per_ip", self.buys_per_ip.let_through()),
            ("logins_per_ip", self.logins_per_ip.let_through()),
            ("reads_per_ip", self.reads_per_ip.let_through()),
            ("searches_per_ip", self.searches_per_ip.let_through()),
            ("probes_per_ip", self.probes_per_ip.let_through()),
            ("own_per_user", self.own_per_user.let_through()),
        ]
    }
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
    /// One permit per search for shops by name that may be under way.
    pub(crate) searches: Semaphore,
    pub(crate) readiness: Readiness,
    draining: AtomicBool,
}

impl App {
    pub fn new(engine: Arc<Engine>, config: Config, metrics: PrometheusHandle) -> Self {
        let limits = Limits {
            buys_per_user: SlidingWindow::new(config.buys_per_user, config.limit_memory),
            buys_per_ip: SlidingWindow::new(config.buys_per_ip, config.limit_memory),
            logins_per_ip: SlidingWindow::new(config.logins_per_ip, config.limit_memory),
            reads_per_ip: SlidingWindow::new(config.reads_per_ip, config.limit_memory),
            searches_per_ip: SlidingWindow::new(config.searches_per_ip, config.limit_memory),
            probes_per_ip: SlidingWindow::new(config.probes_per_ip, config.limit_memory),
            own_per_user: SlidingWindow::new(config.own_per_user, config.limit_memory),
        };
        let (buy_metrics, http_metrics) = (BuyMetrics::new(), HttpMetrics::new());
        let tokens = config.admin_tokens.clone();
        let administrators = Administrators::new(tokens, config.wrong_admin_tokens_per_ip, config.limit_memory);
        Self {
            searches: Semaphore::new(config.searches_at_once),
            readiness: Readiness::default(),
            security_log: SecurityLog::new(),
            draining: AtomicBool::new(false),
            engine,
            config,
            metrics,
            buy_metrics,
            http_metrics,
            limits,
            administrators,
        }
    }

    /// From now on these administrators are accepted and no others.
    pub fn replace_admin_tokens(&self, tokens: Vec<AdminToken>) {
        self.administrators.replace(tokens);
    }

    /// From now on `/readyz` says no, so that no new traffic is sent here.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// What a listener serves, and the document that tells of it.
    pub(crate) fn routes(self: Arc<Self>, surface: Surface) -> Router {
        let (router, api) = openapi::collect(surface, self.config.allow_load_test).split_for_parts();
        let mut router = router.merge(openapi::pages(&openapi::complete(api), self.clone()));
        if surface != Surface::Admin {
            router = router
                .route("/", get(page::index))
                .route("/assets/app.js", get(page::script))
                .route("/assets/style.css", get(page::style));
        }
        router.fallback(async || Problem::new(Code::NotFound)).with_state(self)
    }
}
