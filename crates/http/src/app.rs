//! What the handlers share, and the routes.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::address::Network;
use crate::credentials::AdminToken;
use crate::orders::BuyMetrics;
use crate::problem::Problem;
use crate::server::HttpMetrics;
use crate::{admin, login, operations, orders, page, sales, shops};
use axum::Router;
use axum::routing::{delete, get, post, put};
use metrics_exporter_prometheus::PrometheusHandle;
use stampede_core::{Code, UserId};
use stampede_engine::Engine;
use stampede_limit::{Limit, SlidingWindow};

#[derive(Debug, Clone)]
pub struct Config {
    pub admin_tokens: Vec<AdminToken>,
    /// Whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<Network>,
    /// Tries to buy per person.
    pub buys_per_user: Limit,
    /// Login codes and logins per address.
    pub logins_per_ip: Limit,
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

#[derive(Debug)]
pub struct App {
    pub(crate) engine: Arc<Engine>,
    pub(crate) config: Config,
    pub(crate) metrics: PrometheusHandle,
    pub(crate) buy_metrics: BuyMetrics,
    pub(crate) http_metrics: HttpMetrics,
    pub(crate) buys_per_user: SlidingWindow<UserId>,
    pub(crate) logins_per_ip: SlidingWindow<IpAddr>,
    draining: AtomicBool,
}

impl App {
    pub fn new(engine: Arc<Engine>, config: Config, metrics: PrometheusHandle) -> Self {
        let buys_per_user = SlidingWindow::new(config.buys_per_user, config.limit_memory);
        let logins_per_ip = SlidingWindow::new(config.logins_per_ip, config.limit_memory);
        let (buy_metrics, http_metrics) = (BuyMetrics::new(), HttpMetrics::new());
        let draining = AtomicBool::new(false);
        Self { engine, config, metrics, buy_metrics, http_metrics, buys_per_user, logins_per_ip, draining }
    }

    /// From now on `/readyz` says no, so that no new traffic is sent here.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    pub(crate) fn routes(self: Arc<Self>, surface: Surface) -> Router {
        let mut router =
            Router::new().route("/healthz", get(operations::healthz)).route("/readyz", get(operations::readyz));
        if surface != Surface::Admin {
            router = router
                .route("/", get(page::index))
                .route("/assets/app.js", get(page::script))
                .route("/assets/style.css", get(page::style))
                .route("/v1/login/codes", post(login::send_code))
                .route("/v1/login", post(login::log_in))
                .route("/v1/session", delete(login::log_out))
                .route("/v1/sessions", get(login::sessions))
                .route("/v1/sessions/{id}", delete(login::end_session))
                .route("/v1/me", get(login::me))
                .route("/v1/shop-types", get(shops::types))
                .route("/v1/shops", get(shops::list))
                .route("/v1/shops/{id}", get(shops::one))
                .route("/v1/shops/{id}/vouchers", get(shops::vouchers))
                .route("/v1/sales", get(sales::list))
                .route("/v1/sales/{id}", get(sales::one))
                .route("/v1/sales/{id}/orders", post(orders::buy))
                .route("/v1/orders", get(orders::list))
                .route("/v1/orders/{id}", get(orders::one))
                .route("/v1/orders/{id}/cancel", post(orders::cancel));
        }
        if surface != Surface::Buyers {
            router = router
                .route("/metrics", get(operations::metrics))
                .route("/admin/v1/audit", get(admin::audit))
                .route("/admin/v1/shops", post(shops::create))
                .route("/admin/v1/shops/{id}", put(shops::edit))
                .route("/admin/v1/shops/{id}/vouchers", get(shops::all_vouchers))
                .route("/admin/v1/vouchers", post(shops::create_voucher))
                .route("/admin/v1/vouchers/{id}", put(shops::edit_voucher))
                .route("/admin/v1/vouchers/{id}/shelve", post(shops::shelve))
                .route("/admin/v1/vouchers/{id}/unshelve", post(shops::unshelve))
                .route("/admin/v1/sales", get(admin::list_sales).post(admin::create_sale))
                .route("/admin/v1/sales/{id}", get(admin::one_sale))
                .route("/admin/v1/sales/{id}/pause", post(admin::pause))
                .route("/admin/v1/sales/{id}/resume", post(admin::resume))
                .route("/admin/v1/sales/{id}/end", post(admin::end))
                .route("/admin/v1/sales/{id}/top-ups", post(admin::top_up));
        }
        router.fallback(async || Problem::new(Code::NotFound)).with_state(self)
    }
}
