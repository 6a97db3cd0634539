//! Log lines about who was let in and who was not, with the client's address. Each kind has its own bound of lines in a time, so
//! that no attacker fills the disk or hides one kind behind another.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use stampede_core::{Code, UserId};

/// So many lines of a kind in so long: a few hundred megabytes a day at most, with every kind at its bound.
const LINES_PER_WINDOW: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);

/// Lets so many lines through per window, and reports how many it did not.
#[derive(Debug, Clone)]
struct Throttle {
    kind: &'static str,
    window: Duration,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    since: Instant,
    lines: u32,
    suppressed: u64,
}

impl Throttle {
    fn new(kind: &'static str) -> Self {
        let state = State { since: Instant::now(), lines: 0, suppressed: 0 };
        Self { kind, window: WINDOW, state: Arc::new(Mutex::new(state)) }
    }

    /// May one more line be written? Of those that may not, the number is written when the window is over.
    fn allows(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now.duration_since(state.since) >= self.window {
            (state.since, state.lines) = (now, 0);
        }
        if state.lines < LINES_PER_WINDOW {
            state.lines += 1;
            return true;
        }
        state.suppressed += 1;
        if state.suppressed == 1 {
            let (end, throttle) = (state.since + self.window, self.clone());
            tokio::spawn(async move {
                tokio::time::sleep_until(end.into()).await;
                throttle.report();
            });
        }
        false
    }

    fn report(&self) {
        let suppressed = std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).suppressed);
        tracing::warn!(kind = self.kind, suppressed, "more lines of this kind were not written");
    }
}

/// Does this status say that the caller is not known, or not allowed to do it?
pub(crate) fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// Why a request for administrators was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdminRefusal {
    NoToken,
    WrongToken,
    TooManyWrongTokens,
    /// The token is a viewer's; the request would change something.
    ViewerOnly,
}

impl AdminRefusal {
    const ALL: [Self; 4] = [Self::NoToken, Self::WrongToken, Self::TooManyWrongTokens, Self::ViewerOnly];

    const fn as_str(self) -> &'static str {
        match self {
            Self::NoToken => "no token",
            Self::WrongToken => "wrong token",
            Self::TooManyWrongTokens => "too many wrong tokens",
            Self::ViewerOnly => "viewer only",
        }
    }
}

#[derive(Debug)]
pub(crate) struct SecurityLog {
    /// In the order of [`AdminRefusal::ALL`].
    administrators: [Throttle; 4],
    buyers: Throttle,
    logins: Throttle,
    refused_logins: Throttle,
}

impl SecurityLog {
    pub(crate) fn new() -> Self {
        Self {
            administrators: AdminRefusal::ALL.map(|reason| Throttle::new(reason.as_str())),
            buyers: Throttle::new("buyer refused"),
            logins: Throttle::new("logged in"),
            refused_logins: Throttle::new("login refused"),
        }
    }

    /// `name` is the administrator's, if the token is known.
    pub(crate) fn administrator_refused(&self, address: IpAddr, reason: AdminRefusal, name: Option<&str>) {
        metrics::counter!("stampede_admin_refused_total", "reason" => reason.as_str()).increment(1);
        if self.administrators[reason as usize].allows() {
            tracing::warn!(%address, reason = reason.as_str(), administrator = name, "an administrator's request was refused");
        }
    }

    /// The method and the path are in the span of the request.
    pub(crate) fn buyer_refused(&self, address: IpAddr, status: StatusCode) {
        if self.buyers.allows() {
            tracing::info!(%address, status = status.as_u16(), "a request was refused");
        }
    }

    /// `phone` is masked by its text.
    pub(crate) fn logged_in(&self, address: IpAddr, phone: impl Display, user: UserId) {
        if self.logins.allows() {
            tracing::info!(%address, %phone, %user, "logged in");
        }
    }

    pub(crate) fn login_refused(&self, address: IpAddr, phone: impl Display, code: Code) {
        if self.refused_logins.allows() {
            tracing::info!(%address, %phone, reason = code.as_str(), "a login was refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_bounded_and_the_rest_is_counted() {
        let throttle = Throttle { window: Duration::from_millis(500), ..Throttle::new("test") };
        let written = (0..1000).filter(|_| throttle.allows()).count();
        let suppressed = || throttle.state.lock().unwrap().suppressed;
        assert_eq!((written, suppressed()), (20, 980));
        let deadline = Instant::now() + throttle.window * 60;
        while suppressed() > 0 {
            assert!(Instant::now() < deadline, "never reported");
            tokio::time::sleep(throttle.window / 20).await;
        }
        assert!(throttle.allows(), "there is room again");
    }
}
