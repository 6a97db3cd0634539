//! Metrics of all requests: how many by status, and how long each route takes.

use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use axum::http::StatusCode;
use metrics::{Counter, Histogram, counter, histogram};
use pin_project_lite::pin_project;
use tower::{Layer, Service};

use crate::buy;
use crate::load_test::NOOP;

/// Created once: looking up a counter by name costs more than answering a request.
#[derive(Debug)]
pub(crate) struct HttpMetrics {
    /// By status, from 100 on.
    by_status: Vec<OnceLock<Counter>>,
    /// How long buying takes. Its fast path does not pass through a [`Timed`].
    pub(crate) buying: Histogram,
    /// The same for the no-op of load tests, registered when it is first used.
    noop: OnceLock<Histogram>,
}

impl HttpMetrics {
    pub(crate) fn new() -> Self {
        let by_status = (100..600).map(|_| OnceLock::new()).collect();
        Self { by_status, buying: seconds(buy::PATH.to_owned()), noop: OnceLock::new() }
    }

    pub(crate) fn noop(&self) -> &Histogram {
        self.noop.get_or_init(|| seconds(NOOP.to_owned()))
    }

    pub(crate) fn count(&self, status: StatusCode) {
        let index = usize::from(status.as_u16()).saturating_sub(100);
        if let Some(counter) = self.by_status.get(index) {
            let new = || counter!("stampede_http_requests_total", "status" => status.as_str().to_owned());
            counter.get_or_init(new).increment(1);
        }
    }
}

/// Measures how long a route takes.
#[derive(Debug, Clone)]
pub(crate) struct TimedLayer(Histogram);

impl TimedLayer {
    pub(crate) fn new(route: String) -> Self {
        Self(seconds(route))
    }
}

fn seconds(route: String) -> Histogram {
    histogram!("stampede_http_seconds", "route" => route)
}

impl<S> Layer<S> for TimedLayer {
    type Service = Timed<S>;

    fn layer(&self, inner: S) -> Timed<S> {
        Timed { inner, seconds: self.0.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Timed<S> {
    inner: S,
    seconds: Histogram,
}

impl<R, S: Service<R>> Service<R> for Timed<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = TimedFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Self::Future {
        let seconds = self.seconds.clone();
        TimedFuture { started: Instant::now(), inner: self.inner.call(request), seconds }
    }
}

pin_project! {
    /// A request in progress.
    #[derive(Debug)]
    pub(crate) struct TimedFuture<F> {
        #[pin]
        inner: F,
        started: Instant,
        seconds: Histogram,
    }
}

impl<F: Future> Future for TimedFuture<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let output = ready!(this.inner.poll(cx));
        this.seconds.record(this.started.elapsed());
        Poll::Ready(output)
    }
}
