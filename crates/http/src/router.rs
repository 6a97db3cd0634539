//! The routes.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use stampede_core::Code;
use tokio::time::timeout;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter, UtoipaMethodRouterExt as _};
use utoipa_axum::routes;

use crate::app::{App, Surface};
use crate::metrics::TimedLayer;
use crate::problem::Problem;
use crate::{admin, buy, load_test, login, openapi, operations, orders, page, payments, sales, shops};

type Route = UtoipaMethodRouter<Arc<App>>;

/// The routes that are called by the router alone.
fn router_routes(surface: Surface, load_test: bool, test_payments: bool) -> Vec<Route> {
    let mut routes = vec![routes!(operations::healthz), routes!(operations::readyz)];
    if surface.serves_metrics() {
        routes.push(routes!(operations::metrics));
    }
    if surface.serves_buyers() {
        routes.extend([
            routes!(login::send_code),
            routes!(login::puzzle),
            routes!(login::log_in),
            routes!(login::log_out),
            routes!(login::sessions, login::end_sessions),
            routes!(login::end_session),
            routes!(login::me),
            routes!(shops::types),
            routes!(shops::list),
            routes!(shops::one),
            routes!(shops::vouchers),
            routes!(sales::list),
            routes!(sales::one),
            routes!(orders::list),
            routes!(orders::one),
            routes!(orders::history),
            routes!(orders::events),
            routes!(orders::cancel),
            routes!(orders::redeem_code),
            routes!(payments::callback),
        ]);
        if test_payments {
            routes.push(routes!(payments::pay));
        }
    }
    if surface.serves_administrators() {
        routes.extend([
            routes!(admin::audit::log),
            routes!(admin::users::find),
            routes!(admin::users::one),
            routes!(admin::users::end_sessions),
            routes!(admin::users::disable),
            routes!(admin::users::enable),
            routes!(admin::shops::create),
            routes!(admin::shops::edit),
            routes!(admin::vouchers::all_vouchers),
            routes!(admin::vouchers::create_voucher),
            routes!(admin::vouchers::edit_voucher),
            routes!(admin::vouchers::shelve),
            routes!(admin::vouchers::unshelve),
            routes!(admin::sales::list_sales, admin::sales::create_sale),
            routes!(admin::sales::one_sale),
            routes!(admin::sales::pause),
            routes!(admin::sales::resume),
            routes!(admin::sales::end),
            routes!(admin::sales::edit_window),
            routes!(admin::sales::top_up),
            routes!(admin::sales::reduce),
            routes!(admin::gate::gate),
            routes!(admin::gate::marks),
            routes!(admin::gate::orders_in),
            routes!(admin::orders::one),
            routes!(admin::orders::cancel),
            routes!(admin::orders::refund),
            routes!(admin::orders::redeem),
            routes!(admin::orders::open_refunds),
            routes!(admin::orders::retry_refund),
            routes!(admin::orders::complete_refund),
            routes!(admin::quarantine::list),
            routes!(admin::quarantine::one),
            routes!(admin::quarantine::retry),
            routes!(admin::quarantine::discard),
            routes!(admin::dead_letters::list),
            routes!(admin::dead_letters::one),
            routes!(admin::dead_letters::retry),
            routes!(admin::dead_letters::discard),
            routes!(admin::events::list),
            routes!(admin::events::retry),
            routes!(admin::reconcile::log, admin::reconcile::run),
            routes!(admin::reconcile::rebuild),
        ]);
        if load_test {
            routes.push(routes!(load_test::sessions));
        }
    }
    routes
}

/// The routes that the service also calls past the router, on the fast path. They have their own timeouts and metrics.
fn fast_path_routes(surface: Surface, load_test: bool) -> Vec<Route> {
    let mut routes = Vec::new();
    if surface.serves_buyers() {
        routes.push(routes!(buy::buy));
    }
    if load_test {
        routes.push(routes!(load_test::noop));
    }
    routes
}

fn collect(routes: impl IntoIterator<Item = Route>) -> OpenApiRouter<Arc<App>> {
    routes.into_iter().fold(OpenApiRouter::new(), OpenApiRouter::routes)
}

/// The documentation of every route, as the handlers declare it.
pub(crate) fn declared() -> OpenApi {
    collect(router_routes(Surface::Both, true, true).into_iter().chain(fast_path_routes(Surface::Both, true)))
        .into_openapi()
}

/// What a listener serves, with the OpenAPI document of it.
pub(crate) fn build(app: Arc<App>, surface: Surface) -> Router {
    let (load_test, answer_timeout) = (app.config.allow_load_test, app.config.answer_timeout);
    let test_payments = app.engine.allows_test_payments();
    let routed = router_routes(surface, load_test, test_payments).into_iter().map(|route| {
        let path = route.1.paths.keys().next().cloned().unwrap_or_default();
        let bounded: Route = route.layer(from_fn_with_state(answer_timeout, with_timeout));
        bounded.layer(TimedLayer::new(path))
    });
    let (router, api) = collect(routed.chain(fast_path_routes(surface, load_test))).split_for_parts();
    let mut router = router.merge(openapi::pages(&openapi::complete(api), app.clone()));
    if surface.serves_buyers() {
        router = router
            .route("/", get(page::index))
            .route("/assets/app.js", get(page::script))
            .route("/assets/style.css", get(page::style));
    }
    router.fallback(async || Problem::new(Code::NotFound)).with_state(app)
}

async fn with_timeout(State(limit): State<Duration>, request: Request, next: Next) -> Response {
    let response = timeout(limit, next.run(request)).await;
    response.unwrap_or_else(|_| Problem::new(Code::OutcomeUnknown).into_response())
}

/// Whether only administrators may call this path.
pub(crate) fn is_admin_path(path: &str) -> bool {
    path.starts_with("/admin/") || path == "/metrics"
}
