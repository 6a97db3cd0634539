//! Redis hangs, is slow or is not there: the counts of the node decide, and requests wait for a short time only.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_limit::{Check, Counters, Limiter, check_all, undo_all};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Proxy, redis, until};

use crate::{SERVER, connect, new_prefix, per_hour};

const CALL_TIMEOUT: Duration = Duration::from_millis(20);

/// Counters with the timeout of the defaults, through a proxy.
async fn behind_proxy(prefix: &str) -> (Proxy, Counters) {
    behind_proxy_with(prefix, CALL_TIMEOUT).await
}

async fn behind_proxy_with(prefix: &str, call_timeout: Duration) -> (Proxy, Counters) {
    let proxy = Proxy::start(SERVER.address()).await.unwrap();
    let counters = Counters::Redis(connect(proxy.address().port(), prefix, call_timeout));
    let limiter: Limiter<u8> = Limiter::new(&counters, "first", per_hour(1_000_000), 1000);
    until("Redis answers", async || {
        let before = limiter.fallbacks();
        limiter.check(0).await.is_ok() && limiter.fallbacks() == before
    })
    .await;
    (proxy, counters)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_do_not_wait_while_redis_hangs() {
    let prefix = new_prefix();
    let (proxy, counters) = behind_proxy(&prefix).await;
    let limiter: Limiter<u32> = Limiter::new(&counters, "buys", per_hour(1_000_000), 1000);
    proxy.set(Fault::Hang);
    let started = Instant::now();
    limiter.check(1).await.unwrap();
    let first = started.elapsed();
    assert!(first >= CALL_TIMEOUT && first < Duration::from_millis(500), "{first:?}");
    // No more waiting: far less than one timeout each.
    let started = Instant::now();
    for _ in 0..1000 {
        limiter.check(1).await.unwrap();
    }
    assert!(started.elapsed() < 1000 * CALL_TIMEOUT / 20, "{:?}", started.elapsed());
    assert_eq!(limiter.fallbacks(), 1001);
    let Counters::Redis(redis) = &counters else { unreachable!() };
    let calls = redis.calls();

    // The overdue call ends the pause.
    proxy.set(Fault::None);
    until("Redis counts again", async || {
        let before = limiter.fallbacks();
        limiter.check(1).await.unwrap();
        limiter.fallbacks() == before
    })
    .await;
    assert!(redis.calls() <= calls + 3, "one call at a time was under way");
}

/// Above the limit a node refuses by itself, whether Redis answers or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_fall_back_to_the_counts_of_the_node() {
    let prefix = new_prefix();
    let (proxy, counters) = behind_proxy(&prefix).await;
    let logins: Limiter<&str> = Limiter::new(&counters, "logins", per_hour(4), 1000);
    let codes: Limiter<&str> = Limiter::new(&counters, "codes", per_hour(4), 1000);
    let code = || [Check { limiter: &codes, key: "a", maximum: 4 }];
    for _ in 0..2 {
        logins.check("a").await.unwrap();
        check_all(&code()).await.unwrap();
    }
    proxy.set(Fault::Hang);
    let (before_logins, before_codes) = (logins.fallbacks(), codes.fallbacks());
    for _ in 0..2 {
        logins.check("a").await.unwrap();
        check_all(&code()).await.unwrap();
    }
    logins.check("a").await.unwrap_err();
    check_all(&code()).await.unwrap_err();
    assert_eq!(logins.fallbacks() - before_logins, 2);
    assert_eq!(codes.fallbacks() - before_codes, 3);
    undo_all(&code());
    check_all(&code()).await.unwrap();
    check_all(&code()).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_answers_are_not_waited_for() {
    let prefix = new_prefix();
    let (proxy, counters) = behind_proxy(&prefix).await;
    let limiter: Limiter<u32> = Limiter::new(&counters, "reads", per_hour(1_000_000), 1000);
    proxy.set(Fault::Delay(Duration::from_millis(200)));
    let started = Instant::now();
    for n in 0..50 {
        limiter.check(n).await.unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(limiter.fallbacks() >= 40);
}

/// Redis answers every call in time, but more checks are waiting than it can count: those that wait too long are decided by the node, and
/// are not counted later, when they would hold up others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_queue_is_not_waited_for() {
    const CHECKS: u32 = 4000;
    /// Of each packet, so that a call takes about half of its time.
    const DELAY: Duration = Duration::from_millis(60);
    /// Longer than by default, for a busy machine.
    const PATIENCE: Duration = Duration::from_millis(400);
    let prefix = new_prefix();
    let (proxy, counters) = behind_proxy_with(&prefix, PATIENCE).await;
    let limiter: Arc<Limiter<u32>> = Arc::new(Limiter::new(&counters, "buys", per_hour(1_000_000), 10_000));
    let Counters::Redis(redis) = &counters else { unreachable!() };
    let calls = redis.calls();
    proxy.set(Fault::Delay(DELAY));
    let checks: Vec<_> = (0..CHECKS)
        .map(|n| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let started = Instant::now();
                limiter.check(n).await.unwrap();
                started.elapsed()
            })
        })
        .collect();
    let mut longest = Duration::ZERO;
    for check in checks {
        longest = longest.max(check.await.unwrap());
    }
    // All of them would take 16 calls, so more than 1.9 s.
    assert!(longest < 2 * PATIENCE + Duration::from_millis(500), "{longest:?}");
    assert!(limiter.fallbacks() >= u64::from(CHECKS) / 4, "{} fallbacks", limiter.fallbacks());
    proxy.set(Fault::None);
    until("Redis counts again", async || {
        let before = limiter.fallbacks();
        limiter.check(CHECKS).await.unwrap();
        limiter.fallbacks() == before
    })
    .await;
    assert!(redis.calls() - calls < 12, "{} calls", redis.calls() - calls);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_shared_again_when_redis_is_back() {
    let server = redis::start().unwrap();
    server.kill().unwrap();
    let prefix = new_prefix();
    let nodes = [(); 2].map(|()| Counters::Redis(connect(server.port(), &prefix, Duration::from_secs(1))));
    let [one, other]: [Limiter<u32>; 2] = [0, 1].map(|n| Limiter::new(&nodes[n], "buys", per_hour(5), 1000));
    let started = Instant::now();
    one.check(1).await.unwrap();
    one.check(1).await.unwrap();
    assert_eq!(one.fallbacks(), 2);
    assert!(started.elapsed() < Duration::from_secs(5), "a refused connection is no reason to wait");
    server.restart().unwrap();
    for limiter in [&one, &other] {
        let mut next_key = 100;
        until("Redis counts again", async || {
            let before = limiter.fallbacks();
            next_key += 1;
            limiter.check(next_key).await.unwrap();
            limiter.fallbacks() == before
        })
        .await;
    }
    let mut granted = 0;
    for n in 0..20 {
        granted += u32::from(if n % 2 == 0 { one.check(2).await } else { other.check(2).await }.is_ok());
    }
    assert_eq!(granted, 5);
}
