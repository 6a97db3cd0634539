//! The settings of the tests, which the benchmark of the start uses too.

use std::time::Duration;

use stampede_engine::{AlertConfig, AuthConfig, CacheConfig, SendBudgets};
use stampede_limit::Limit;

pub const CACHE: CacheConfig = CacheConfig {
    ttl: Duration::from_secs(60),
    refresh_after: Duration::from_secs(10),
    empty_ttl: Duration::from_secs(5),
    local_ttl: Duration::from_secs(1),
    jitter: 0.1,
    max_entries: 1000,
    filter_rebuild_interval: Duration::from_secs(60),
    redis_timeout: Duration::from_secs(1),
};

pub const AUTH: AuthConfig = AuthConfig {
    session_ttl: Duration::from_secs(60),
    session_lifetime: Duration::from_secs(24 * 3600),
    max_sessions: 20,
    session_memory: 100,
    session_keys: None,
    code_ttl: Duration::from_secs(60),
    code_tries: 5,
    budgets: SendBudgets::uniform(Limit { count: 1_000_000, window: Duration::from_secs(60) }, 100),
    proof_of_work_bits: 0,
    show_codes: true,
};

pub const ALERTS: AlertConfig = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
