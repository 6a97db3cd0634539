//! For whoever runs it: is it alive, is it ready, what are its figures.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use stampede_core::Code;

use crate::app::App;
use crate::extract::{Prober, Viewer};
use crate::problem::Problem;

/// Is it alive?
#[utoipa::path(get, path = "/healthz", tag = "operations", responses((status = 200, description = "Yes", body = String)))]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Should it get traffic? If not, `detail` tells why.
#[utoipa::path(get, path = "/readyz", tag = "operations", responses((status = 200, description = "Yes", body = String)))]
pub(crate) async fn readyz(State(app): State<Arc<App>>, _: Prober) -> Result<&'static str, Problem> {
    if app.is_draining() {
        return Err(Problem::new(Code::Unavailable).detail("shutting down"));
    }
    let engine = app.engine.clone();
    match app.readiness.of(|| async move { engine.ready().await }).await {
        Ok(()) => Ok("ready\n"),
        Err(unready) => Err(Problem::new(unready.code).detail(unready.detail)),
    }
}

/// Figures for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "operations", responses((status = 200, description = "Text", body = String)))]
pub(crate) async fn metrics(State(app): State<Arc<App>>, _: Viewer) -> Response {
    #[expect(clippy::cast_precision_loss, reason = "a queue is far shorter than 2^52")]
    metrics::gauge!("stampede_commit_waiting").set(app.engine.waiting() as f64);
    let of_administrators = ("wrong_tokens_per_ip", app.administrators.let_through());
    for (limit, count) in app.limits.let_through().into_iter().chain([of_administrators]) {
        metrics::counter!("stampede_limit_let_through_total", "limit" => limit).absolute(count);
    }
    for (cache, stats) in app.engine.cache_stats() {
        for (what, count) in stats.iter() {
            metrics::counter!("stampede_cache_total", "cache" => cache.to_owned(), "what" => what).absolute(count);
        }
    }
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.render()).into_response()
}
