//! Sessions: expiry, ending, and the cap per user.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use stampede_core::clock::ManualClock;
use stampede_core::*;
use stampede_engine::{Engine, Error, LoggedIn};

use crate::tier::{CONFIG, Tier, tier, tier_by};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

async fn log_in(engine: &Engine, phone: &str) -> Result<LoggedIn, Error> {
    let phone = Phone::parse(phone).unwrap();
    let sent = engine.send_code(&phone, HERE, None).await.unwrap();
    engine.log_in(phone, &sent.shown.unwrap(), Some(sent.challenge), HERE).await
}

async fn authenticate(engine: &Engine, token: &str) -> Result<UserId, Error> {
    engine.authenticate(engine.verify_token(token)?).await
}

async fn is_refused(engine: &Engine, token: &str) -> bool {
    matches!(authenticate(engine, token).await, Err(error) if error.code() == Code::Unauthorized)
}

/// A tier with a clock that changes only when it is set.
async fn at_rest(config: stampede_engine::Config) -> (Tier, Arc<ManualClock>, Timestamp) {
    let now = SystemClock.now();
    let clock = Arc::new(ManualClock::at(now));
    (tier_by(clock.clone(), config, 1, |inner| inner).await, clock, now)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_slides_with_use_and_expires_without() {
    let (tier, clock, now) = at_rest(CONFIG).await;
    let engine = &tier.engine;
    let ttl = CONFIG.auth.session_ttl;
    let session = log_in(engine, "13800138000").await.unwrap();
    assert_eq!(authenticate(engine, &session.token).await.unwrap(), session.user.id);
    assert!(is_refused(engine, "junk").await);
    let mut at = now;
    for _ in 0..5 {
        at = at.plus(ttl * 2 / 3);
        clock.set(at);
        authenticate(engine, &session.token).await.unwrap();
    }
    clock.set(at.plus(ttl));
    assert!(is_refused(engine, &session.token).await);

    clock.set(at);
    let session = log_in(engine, "13800138000").await.unwrap();
    engine.log_out(&session.token).await.unwrap();
    assert!(is_refused(engine, &session.token).await, "revoked at once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_is_refreshed_by_public_pages() {
    let (tier, clock, now) = at_rest(CONFIG).await;
    let engine = &tier.engine;
    let ttl = CONFIG.auth.session_ttl;
    let session = log_in(engine, "13800138000").await.unwrap();
    let proven = engine.verify_token(&session.token).unwrap();
    for n in 1..=5 {
        clock.set(now.plus(ttl * 2 / 3 * n));
        assert!(engine.refresh(proven), "in memory");
    }
    assert_eq!(authenticate(engine, &session.token).await.unwrap(), session.user.id);
    clock.set(now.plus(ttl * 2 / 3 * 5 + ttl));
    engine.refresh(proven);
    assert!(is_refused(engine, &session.token).await, "what has expired is not revived");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_ends_at_its_lifetime_however_often_it_is_used() {
    let mut config = CONFIG;
    let (step, lifetime) = (config.auth.session_ttl / 2, config.auth.session_ttl * 3);
    config.auth.session_lifetime = lifetime;
    let (tier, clock, now) = at_rest(config).await;
    let engine = &tier.engine;
    let session = log_in(engine, "13800138000").await.unwrap();
    for n in 1..=5 {
        clock.set(now.plus(step * n));
        authenticate(engine, &session.token).await.unwrap();
    }
    clock.set(now.plus(lifetime));
    assert!(is_refused(engine, &session.token).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oldest_session_ends_when_the_cap_is_exceeded() {
    let mut config = CONFIG;
    config.auth.max_sessions = 3;
    let (tier, clock, now) = at_rest(config).await;
    let engine = &tier.engine;
    let other = log_in(engine, "13800138001").await.unwrap();
    let mut tokens = Vec::new();
    for n in 0..5 {
        clock.set(now.plus(Duration::from_millis(n)));
        tokens.push(log_in(engine, "13800138000").await.unwrap().token);
    }
    for (n, token) in tokens.iter().enumerate() {
        assert_eq!(is_refused(engine, token).await, n < 2, "session {n}");
    }
    authenticate(engine, &other.token).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_sessions_of_a_user_end_together() {
    let tier = tier(CONFIG, 1, |inner| inner).await;
    let engine = &tier.engine;
    let (one, two) = (log_in(engine, "13800138000").await.unwrap(), log_in(engine, "13800138000").await.unwrap());
    let other = log_in(engine, "13800138001").await.unwrap();
    engine.end_sessions(one.user.id).await.unwrap();
    assert!(is_refused(engine, &one.token).await && is_refused(engine, &two.token).await);
    authenticate(engine, &other.token).await.unwrap();
    let again = log_in(engine, "13800138000").await.unwrap();
    authenticate(engine, &again.token).await.unwrap();
    let nobody = engine.end_sessions(UserId::new(1).unwrap()).await.unwrap_err();
    assert_eq!(nobody.code(), Code::NoSuchUser);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disabled_account_has_no_sessions_and_cannot_log_in() {
    let tier = tier(CONFIG, 1, |inner| inner).await;
    let engine = &tier.engine;
    let session = log_in(engine, "13800138000").await.unwrap();
    assert!(engine.set_disabled(session.user.id, true).await.unwrap().value.disabled);
    assert!(is_refused(engine, &session.token).await);
    assert_eq!(log_in(engine, "13800138000").await.unwrap_err().code(), Code::AccountDisabled);
    assert!(!engine.set_disabled(session.user.id, false).await.unwrap().value.disabled);
    assert!(is_refused(engine, &session.token).await, "an ended session does not come back");
    let again = log_in(engine, "13800138000").await.unwrap();
    assert_eq!(again.user.id, session.user.id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_session_stays_ended_whatever_the_clock_says() {
    let (tier, clock, now) = at_rest(CONFIG).await;
    let engine = &tier.engine;
    let session = log_in(engine, "13800138000").await.unwrap();
    authenticate(engine, &session.token).await.unwrap();
    clock.set(now.plus(Duration::from_secs(10)));
    engine.log_out(&session.token).await.unwrap();
    for moment in [now.plus(Duration::from_secs(10)), now, now.minus(Duration::from_secs(3600))] {
        clock.set(moment);
        assert!(is_refused(engine, &session.token).await, "at {moment}");
    }
    // Ended by another process: logging out reports it, and the session is ended here, too.
    clock.set(now.plus(Duration::from_secs(20)));
    let session = log_in(engine, "13800138000").await.unwrap();
    let id = engine.verify_token(&session.token).unwrap().session;
    assert!(tier.stores.accounts.end_session(session.user.id, id).await.unwrap());
    assert_eq!(engine.log_out(&session.token).await.unwrap_err().code(), Code::NoSuchSession);
    assert!(is_refused(engine, &session.token).await);
}

/// A closed store answers every call with an error. Malformed tokens are refused as usual, so they do not reach it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_tokens_reach_no_store() {
    let tier = tier(CONFIG, 1, |inner| inner).await;
    let engine = &tier.engine;
    let real = log_in(engine, "13800138000").await.unwrap().token;
    tier.stores.ledger.close().await;
    let mut junk = real.clone().into_bytes();
    for n in 0..stampede_testkit::count(1_000_000, 20_000) {
        let place = (n % 54) as usize;
        junk[place] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef"[(n / 54 % 32) as usize];
        let junk = std::str::from_utf8(&junk).unwrap();
        // The first character may be the right one.
        assert!(junk == real || is_refused(engine, junk).await);
    }
}
