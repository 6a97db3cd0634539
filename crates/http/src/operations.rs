//! Health, readiness and metrics.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use metrics::counter;
use stampede_core::Code;
use stampede_engine::Ready;
use stampede_limit::Counters;

use crate::app::{App, LimitStats};
use crate::extract::{Prober, Viewer};
use crate::problem::Problem;

/// Whether the process is alive.
#[utoipa::path(get, path = "/healthz", tag = "operations", responses((status = 200, description = "Alive", body = String)))]
pub(crate) async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether the server is ready for requests. If not, `detail` says why. With a queue, orders are also accepted without the database; the
/// answer then says so.
#[utoipa::path(get, path = "/readyz", tag = "operations", responses((status = 200, description = "Ready", body = String)))]
pub(crate) async fn readyz(State(app): State<Arc<App>>, _: Prober) -> Result<&'static str, Problem> {
    if app.draining().is_cancelled() {
        return Err(Problem::new(Code::Unavailable).detail("shutting down"));
    }
    let engine = app.engine.clone();
    match app.readiness.check(|| async move { engine.ready().await }).await {
        Ok(Ready::Fully) => Ok("ready\n"),
        Ok(Ready::WithoutLedger) if app.config.serves_buyers => {
            Ok("ready, without the database: orders are accepted and wait in the queue\n")
        }
        Ok(Ready::WithoutLedger) => {
            Err(Problem::new(Code::Unavailable).detail("the database cannot be used, so no orders are recorded"))
        }
        Err(unready) => Err(Problem::new(unready.code).detail(unready.detail)),
    }
}

/// Metrics in the Prometheus text format.
#[utoipa::path(get, path = "/metrics", tag = "operations", responses((status = 200, description = "Metrics", body = String)))]
pub(crate) async fn metrics(State(app): State<Arc<App>>, _: Viewer) -> Response {
    #[expect(clippy::cast_precision_loss, reason = "a queue is far shorter than 2^52")]
    metrics::gauge!("stampede_commit_waiting").set(app.engine.waiting() as f64);
    report_limits(&app);
    for (cache, stats) in app.engine.cache_stats() {
        for (what, count) in stats.iter() {
            counter!("stampede_cache_total", "cache" => cache.to_owned(), "what" => what).absolute(count);
        }
    }
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.render()).into_response()
}

fn report_limits(app: &App) {
    let let_through = |limit, count| counter!("stampede_limit_let_through_total", "limit" => limit).absolute(count);
    let stats = app.limits.stats();
    for LimitStats { limit, let_through: count, .. } in &stats {
        let_through(*limit, *count);
    }
    let_through("wrong_tokens_per_address", app.administrators.let_through());
    for (limit, count) in app.engine.code_limits_let_through() {
        let_through(limit, count);
    }
    if let Counters::Redis(counters) = app.engine.limit_counters() {
        counter!("stampede_limit_calls_total").absolute(counters.calls());
        let fallback = |limit, count| counter!("stampede_limit_fallback_total", "limit" => limit).absolute(count);
        for LimitStats { limit, fallbacks, .. } in &stats {
            fallback(*limit, *fallbacks);
        }
        fallback("codes", app.engine.code_limit_fallbacks());
    }
}
