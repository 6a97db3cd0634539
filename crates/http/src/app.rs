//! What the handlers share, and the routes.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::address::Network;
use crate::credentials::{AdminToken, Administrators};
use crate::figures::HttpMetrics;
use crate::orders::BuyMetrics;
use crate::problem::Problem;
use crate::security_log::SecurityLog;
use crate::{openapi, page};
use axum::Router;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;
use stampede_core::{Code, UserId};
use stampede_engine::Engine;
use stampede_limit::{Limit, SlidingWindow};

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
    /// Login codes and logins per address.
    pub logins_per_ip: Limit,
    /// Looks at shops and sales per address.
    pub reads_per_ip: Limit,
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
    pub(crate) logins_per_ip: SlidingWindow<IpAddr>,
    pub(crate) reads_per_ip: SlidingWindow<IpAddr>,
    pub(crate) own_per_user: SlidingWindow<UserId>,
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
    draining: AtomicBool,
}

impl App {
    pub fn new(engine: Arc<Engine>, config: Config, metrics: PrometheusHandle) -> Self {
        let limits = Limits {
            buys_per_user: SlidingWindow::new(config.buys_per_user, config.limit_memory),
            logins_per_ip: SlidingWindow::new(config.logins_per_ip, config.limit_memory),
            reads_per_ip: SlidingWindow::new(config.reads_per_ip, config.limit_memory),
            own_per_user: SlidingWindow::new(config.own_per_user, config.limit_memory),
        };
        let (buy_metrics, http_metrics) = (BuyMetrics::new(), HttpMetrics::new());
        let tokens = config.admin_tokens.clone();
        let administrators = Administrators::new(tokens, config.wrong_admin_tokens_per_ip, config.limit_memory);
        let (security_log, draining) = (SecurityLog::new(), AtomicBool::new(false));
        Self { engine, config, metrics, buy_metrics, http_metrics, limits, administrators, security_log, draining }
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
        let mut router = router.merge(openapi::pages(openapi::complete(api)));
        if surface != Surface::Admin {
            router = router
                .route("/", get(page::index))
                .route("/assets/app.js", get(page::script))
                .route("/assets/style.css", get(page::style));
        }
        router.fallback(async || Problem::new(Code::NotFound)).with_state(self)
    }
}
