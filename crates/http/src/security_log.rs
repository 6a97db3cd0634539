//! Log lines about logins and requests whose access was denied (401 and 403), with the client's address. Each kind of refusal has limits of
//! its own, one per address and one for all addresses. Logins that succeed are all logged: the budgets for sending codes bound them.
//! Refusals such as `sold_out` are not logged here.

use std::fmt::Display;
use std::net::IpAddr;
use std::time::Duration;

use axum::http::StatusCode;
use stampede_core::{Code, UserId};

use crate::log_throttle::AddressLogThrottle;

/// The limit of lines of one kind about one address.
const LINES_PER_ADDRESS: u32 = 20;
/// The limit of lines of one kind: with every kind at its limit, which takes many addresses, about two gigabytes a day.
const LINES_PER_WINDOW: u32 = 200;
const WINDOW: Duration = Duration::from_secs(10);

/// Whether the caller is not authenticated (401) or not authorized (403).
pub(crate) fn is_access_denied(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// Why a request for administrators was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdminRefusal {
    NoToken,
    WrongToken,
    TooManyWrongTokens,
    /// A viewer sent a request that changes something.
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
    administrators: [AddressLogThrottle; 4],
    denied: AddressLogThrottle,
    refused_logins: AddressLogThrottle,
}

impl SecurityLog {
    pub(crate) fn new() -> Self {
        let throttle = |kind| AddressLogThrottle::new(kind, LINES_PER_ADDRESS, LINES_PER_WINDOW, WINDOW);
        Self {
            administrators: AdminRefusal::ALL.map(|reason| throttle(reason.as_str())),
            denied: throttle("access denied"),
            refused_logins: throttle("login refused"),
        }
    }

    /// `name` is the name of the administrator, if the token is valid.
    pub(crate) fn administrator_refused(&self, address: IpAddr, reason: AdminRefusal, name: Option<&str>) {
        metrics::counter!("stampede_admin_refused_total", "reason" => reason.as_str()).increment(1);
        if self.administrators[reason as usize].allows(address) {
            tracing::warn!(%address, reason = reason.as_str(), administrator = name, "an administrator's request was refused");
        }
    }

    /// A request of a buyer or visitor. The method and the path are in the span of the request.
    pub(crate) fn access_denied(&self, address: IpAddr, status: StatusCode) {
        if self.denied.allows(address) {
            tracing::info!(%address, status = status.as_u16(), "a request was refused");
        }
    }

    /// `phone` is masked by its `Display`.
    pub(crate) fn logged_in(&self, address: IpAddr, phone: impl Display, user: UserId) {
        tracing::info!(%address, %phone, %user, "logged in");
    }

    pub(crate) fn login_refused(&self, address: IpAddr, phone: impl Display, code: Code) {
        if self.refused_logins.allows(address) {
            tracing::info!(%address, %phone, reason = code.as_str(), "a login was refused");
        }
    }
}
