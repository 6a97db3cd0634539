//! The section `[login]`.

use std::time::Duration;

use anyhow::bail;
use serde::Deserialize;
use stampede_engine::{AuthConfig, SendBudgets, SessionKeys};

use super::{Limit, at_least_one};
use crate::redact::SecretUrl;

const DAY_MS: u64 = 24 * 3600 * 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SenderKind {
    None,
    Console,
    Webhook,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Login {
    pub sender: SenderKind,
    pub webhook_url: SecretUrl,
    pub webhook_secret_file: String,
    session_ttl_ms: u64,
    session_lifetime_ms: u64,
    sessions_per_user: usize,
    session_memory: u64,
    pub session_key_file: String,
    code_ttl_ms: u64,
    code_tries: u32,
    codes_per_phone: Limit,
    codes_per_phone_day: Limit,
    codes_per_address: Limit,
    codes_per_ipv6_56: Limit,
    codes_per_ipv6_48: Limit,
    codes_per_shop: Limit,
    proof_of_work_bits: u8,
    pub per_address: Limit,
}

impl Login {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        if self.code_ttl_ms > DAY_MS {
            bail!("invalid settings: login.code_ttl_ms must be at most {DAY_MS}");
        }
        if self.proof_of_work_bits > 32 {
            bail!("invalid settings: login.proof_of_work_bits must be at most 32");
        }
        at_least_one(&[
            ("login.session_ttl_ms", self.session_ttl_ms),
            ("login.session_lifetime_ms", self.session_lifetime_ms),
            ("login.sessions_per_user", self.sessions_per_user as u64),
            ("login.session_memory", self.session_memory),
            ("login.code_ttl_ms", self.code_ttl_ms),
            ("login.codes_per_phone.window_ms", self.codes_per_phone.window_ms),
            ("login.codes_per_phone_day.window_ms", self.codes_per_phone_day.window_ms),
            ("login.codes_per_address.window_ms", self.codes_per_address.window_ms),
            ("login.codes_per_ipv6_56.window_ms", self.codes_per_ipv6_56.window_ms),
            ("login.codes_per_ipv6_48.window_ms", self.codes_per_ipv6_48.window_ms),
            ("login.codes_per_shop.window_ms", self.codes_per_shop.window_ms),
            ("login.per_address.window_ms", self.per_address.window_ms),
        ])
    }

    /// `limit_memory` is how many keys of the send budgets are kept; `demo` shows codes in responses.
    pub(super) fn auth(&self, session_keys: Option<SessionKeys>, limit_memory: usize, demo: bool) -> AuthConfig {
        AuthConfig {
            session_ttl: Duration::from_millis(self.session_ttl_ms),
            session_lifetime: Duration::from_millis(self.session_lifetime_ms),
            max_sessions: self.sessions_per_user,
            session_memory: self.session_memory,
            session_keys,
            code_ttl: Duration::from_millis(self.code_ttl_ms),
            code_tries: self.code_tries,
            budgets: SendBudgets {
                per_phone: self.codes_per_phone.into(),
                per_phone_day: self.codes_per_phone_day.into(),
                per_address: self.codes_per_address.into(),
                per_ipv6_56: self.codes_per_ipv6_56.into(),
                per_ipv6_48: self.codes_per_ipv6_48.into(),
                per_shop: self.codes_per_shop.into(),
                memory: limit_memory,
            },
            proof_of_work_bits: self.proof_of_work_bits,
            show_codes: demo,
        }
    }
}
