//! Limits hold over several nodes that share a Redis server.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use stampede_limit::{Check, Counters, Limit, Limiter, Refused, check_all, undo_all};
use stampede_testkit::{redis, until};

use crate::{HOUR, PATIENCE, SERVER, ask, calls, connect, new_prefix, per_hour, two_nodes};

/// The same limit on both nodes.
fn limiters(nodes: &[Counters; 2], name: &str, limit: Limit) -> [Limiter<&'static str>; 2] {
    [0, 1].map(|n| Limiter::new(&nodes[n], name, limit, 1000))
}

/// The counts of the current and the previous window in Redis.
fn counts(key: &str) -> [u32; 2] {
    let value = ask(&["get", key]);
    let mut numbers = value.split(' ').skip(1).map(|number| number.parse().unwrap());
    std::array::from_fn(|_| numbers.next().unwrap_or(0))
}

#[tokio::test]
async fn limit_holds_over_all_nodes_together() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let [one, other] = limiters(&nodes, "buys", per_hour(10));
    let attempts = (0..40).map(|n| if n % 2 == 0 { one.check("a") } else { other.check("a") });
    let outcomes = join_all(attempts).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 10);
    // What is refused is not counted.
    assert_eq!(counts(&format!("{prefix}:buys:a")), [10, 0]);
    assert_eq!(one.check("b").await, Ok(()), "another key");
    let [elsewhere, _] = limiters(&nodes, "reads", per_hour(10));
    assert_eq!(elsewhere.check("a").await, Ok(()), "another limit");
    assert_eq!((one.fallbacks(), other.fallbacks()), (0, 0));
}

/// Each node holds back up to a twentieth of an approximate limit, and asks Redis about one request in six. A single node is exact.
#[tokio::test]
async fn approximate_limit_is_exceeded_by_what_nodes_hold_back() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let [one, other] = [0, 1].map(|n| Limiter::approximate(&nodes[n], "buys", per_hour(100), 1000));
    // After the call that the start makes.
    until("connected", async || calls(&nodes[0]) > 0 && calls(&nodes[1]) > 0).await;
    let before = calls(&nodes[0]) + calls(&nodes[1]);
    let mut granted = 0;
    for n in 0..400 {
        let limiter = if n % 2 == 0 { &one } else { &other };
        granted += u32::from(limiter.check("a").await.is_ok());
    }
    assert!((100..=110).contains(&granted), "{granted}");
    let calls_made = calls(&nodes[0]) + calls(&nodes[1]) - before;
    assert!(calls_made <= 20, "{calls_made} calls");
    // Requests that were held back are counted even if the one that is sent with them is refused.
    let [current, _] = counts(&format!("{prefix}:buys:a"));
    assert!((100..=110).contains(&current), "{current}");

    let granted = join_all((0..400).map(|_| one.check("b"))).await;
    assert_eq!(granted.iter().filter(|outcome| outcome.is_ok()).count(), 100, "one node alone");
    assert_eq!((one.fallbacks(), other.fallbacks()), (0, 0));
}

/// While a call of Redis is under way, no further requests are granted without an answer.
#[tokio::test]
async fn concurrent_requests_do_not_multiply_what_nodes_hold_back() {
    let nodes = two_nodes(&new_prefix());
    let [one, other] = [0, 1].map(|n| Limiter::approximate(&nodes[n], "buys", per_hour(100), 1000));
    let outcomes = join_all((0..400).map(|n| if n % 2 == 0 { one.check("a") } else { other.check("a") })).await;
    let granted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert!((100..=110).contains(&granted), "{granted}");
}

/// Limits below 100 are exact on every node, also if they may be approximate.
#[tokio::test]
async fn small_limits_are_exact() {
    let nodes = two_nodes(&new_prefix());
    let [one, other] = [0, 1].map(|n| Limiter::approximate(&nodes[n], "buys", per_hour(99), 1000));
    let outcomes = join_all((0..300).map(|n| if n % 2 == 0 { one.check("a") } else { other.check("a") })).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 99);
}

/// A request that the first limit refuses is not counted against the second one, which has held back others.
#[tokio::test]
async fn held_back_requests_are_counted_beside_a_refused_one() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let by_ip = Limiter::new(&nodes[0], "ip", per_hour(7), 1000);
    let other_by_ip = Limiter::new(&nodes[1], "ip", per_hour(7), 1000);
    let by_user = Limiter::approximate(&nodes[0], "user", per_hour(100), 1000);
    let buy = async || by_ip.count_local("ip")?.count_shared_with(by_user.count_local("ann")?).await;
    for _ in 0..5 {
        buy().await.unwrap();
    }
    assert_eq!(ask(&["exists", &format!("{prefix}:user:ann")]), "0", "held back");
    for _ in 0..2 {
        other_by_ip.check("ip").await.unwrap();
    }
    // The sixth of the user is sent with the five before it, which are counted. It is refused for the address, and not counted itself.
    buy().await.unwrap_err();
    assert_eq!(counts(&format!("{prefix}:user:ann")), [5, 0]);
    // Refused by the node itself from now on.
    let before = calls(&nodes[0]);
    buy().await.unwrap_err();
    assert_eq!(calls(&nodes[0]), before);
}

/// What one node alone has counted, and what Redis has refused once, is refused without asking Redis.
#[tokio::test]
async fn node_refuses_by_itself_what_is_above_the_limit() {
    let nodes = two_nodes(&new_prefix());
    let [one, other] = limiters(&nodes, "buys", per_hour(3));
    for _ in 0..3 {
        one.check("a").await.unwrap();
    }
    let before = calls(&nodes[0]);
    let wait = one.check("a").await.unwrap_err();
    assert_eq!(calls(&nodes[0]), before);
    // The other node learns it from Redis, once, and with the same wait.
    let first = other.check("a").await.unwrap_err();
    let before = calls(&nodes[1]);
    for _ in 0..100 {
        let next = other.check("a").await.unwrap_err();
        assert!(first.abs_diff(next) < Duration::from_secs(5), "{first:?} {next:?}");
    }
    assert_eq!(calls(&nodes[1]), before);
    assert!(first.abs_diff(wait) < Duration::from_secs(5), "{first:?} {wait:?}");
}

/// A node that has seen nothing is granted a request after the returned wait, and not earlier.
#[tokio::test]
async fn window_slides_and_the_returned_wait_is_right() {
    let nodes = two_nodes(&new_prefix());
    for count in [1, 4] {
        let limit = Limit { count, window: Duration::from_millis(400) };
        let [one, other] = limiters(&nodes, &format!("buys{count}"), limit);
        let (refused, wait) = loop {
            let at = Instant::now();
            if let Err(wait) = one.check("a").await {
                break (at, wait);
            }
        };
        until("a request is granted", async || other.check("a").await.is_ok()).await;
        // The clocks of the node and of Redis may differ by a little.
        let elapsed = refused.elapsed() + Duration::from_millis(5);
        assert!(elapsed >= wait, "{count}: granted after {elapsed:?} instead of {wait:?}");

        let [third, fourth] = limiters(&nodes, &format!("buys{count}"), limit);
        let wait = loop {
            if let Err(wait) = third.check("a").await {
                break wait;
            }
        };
        tokio::time::sleep(wait + Duration::from_millis(5)).await;
        assert_eq!(fourth.check("a").await, Ok(()), "{count}: after {wait:?}");
    }
}

#[tokio::test]
async fn two_limits_are_checked_in_order_in_one_call() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let [by_ip, other_by_ip] = limiters(&nodes, "ip", per_hour(5));
    let [by_user, other_by_user] = limiters(&nodes, "user", per_hour(2));
    let buy = async |ip: &Limiter<_>, user: &Limiter<_>, name: &'static str| {
        ip.count_local("ip")?.count_shared_with(user.count_local(name)?).await
    };
    // After the call that the start makes.
    by_ip.check("another").await.unwrap();
    let before = calls(&nodes[0]);
    for _ in 0..2 {
        buy(&by_ip, &by_user, "ann").await.unwrap();
    }
    assert_eq!(calls(&nodes[0]) - before, 2);
    // Refused for the user by Redis: counted against the address.
    buy(&other_by_ip, &other_by_user, "ann").await.unwrap_err();
    assert_eq!(counts(&format!("{prefix}:ip:ip")), [3, 0]);
    assert_eq!(counts(&format!("{prefix}:user:ann")), [2, 0]);
    for name in ["bob", "cid"] {
        buy(&other_by_ip, &other_by_user, name).await.unwrap();
    }
    // Refused for the address: not counted against the user, neither in Redis nor on the node.
    for _ in 0..3 {
        buy(&by_ip, &by_user, "bob").await.unwrap_err();
    }
    assert_eq!(counts(&format!("{prefix}:ip:ip")), [5, 0]);
    assert_eq!(counts(&format!("{prefix}:user:bob")), [1, 0]);
    assert_eq!(by_user.check("bob").await, Ok(()));
}

#[tokio::test]
async fn request_is_counted_against_all_limits_or_none_and_can_be_undone() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let day = Limit { count: 4, window: 24 * HOUR };
    let limits = [0, 1].map(|n| {
        [("phone", per_hour(2)), ("day", day), ("shop", per_hour(3))]
            .map(|(name, limit)| Limiter::<&str>::new(&nodes[n], name, limit, 1000))
    });
    let checks = |node: usize, phone: &'static str| {
        let [by_phone, by_day, by_shop] = &limits[node];
        [(by_phone, phone, 2), (by_day, phone, 4), (by_shop, "shop", 3)].map(|(limiter, key, maximum)| Check {
            limiter,
            key,
            maximum,
        })
    };
    let key = |name: &str| counts(&format!("{prefix}:{name}"));
    check_all(&checks(0, "ann")).await.unwrap();
    check_all(&checks(1, "ann")).await.unwrap();
    let refused = check_all(&checks(0, "ann")).await.unwrap_err();
    assert_eq!(refused.place, 0);
    assert!(refused.wait > Duration::ZERO && refused.wait <= 2 * HOUR);
    check_all(&checks(1, "bob")).await.unwrap();
    let Refused { place, .. } = check_all(&checks(0, "cid")).await.unwrap_err();
    assert_eq!(place, 2, "the shop");
    assert_eq!([key("phone:cid"), key("day:cid"), key("shop:shop")], [[0, 0], [0, 0], [3, 0]]);

    // Undone on the node that has not counted it.
    undo_all(&checks(1, "ann"));
    until("undone", async || key("shop:shop") == [2, 0]).await;
    assert_eq!([key("phone:ann"), key("day:ann")], [[1, 0], [1, 0]]);
    check_all(&checks(0, "ann")).await.unwrap();
    check_all(&checks(0, "ann")).await.unwrap_err();
    // What was never counted is not undone.
    undo_all(&checks(0, "dan")[..2]);
    check_all(&checks(0, "dan")).await.unwrap_err();
    assert_eq!(ask(&["exists", &format!("{prefix}:phone:dan")]), "0");
}

/// A request of the previous window can be undone as well.
#[tokio::test]
async fn request_of_the_previous_window_is_undone() {
    let prefix = new_prefix();
    let nodes = two_nodes(&prefix);
    let [one, _] = limiters(&nodes, "codes", per_hour(2));
    let key = format!("{prefix}:codes:a");
    let seconds: u64 = ask(&["time"]).lines().next().unwrap().parse().unwrap();
    ask(&["set", &key, &format!("{} 1 1", seconds / 3600)]);
    let checks = [Check { limiter: &one, key: "a", maximum: 2 }];
    for expected in [[0, 1], [0, 0]] {
        undo_all(&checks);
        until("undone", async || counts(&key) == expected).await;
    }
}

/// Every key expires, at the latest after two windows.
#[tokio::test]
async fn keys_expire() {
    let prefix = new_prefix();
    let [node, _] = two_nodes(&prefix);
    let limit = Limit { count: 3, window: Duration::from_secs(60) };
    let limiter: Limiter<u32> = Limiter::new(&node, "reads", limit, 10_000);
    join_all((0..500).map(|n| limiter.check(n))).await;
    let keys = ask(&["keys", &format!("{prefix}:*")]);
    assert_eq!(keys.lines().count(), 500);
    for key in keys.lines().step_by(50) {
        let ttl_ms: i64 = ask(&["pttl", key]).parse().unwrap();
        assert!((50_000..=120_000).contains(&ttl_ms), "{ttl_ms}");
        let bytes: u32 = ask(&["memory", "usage", key]).parse().unwrap();
        assert!(bytes <= 200, "{bytes} bytes");
    }
    let limit = Limit { count: 3, window: Duration::from_millis(50) };
    let brief: Limiter<u32> = Limiter::new(&node, "brief", limit, 10_000);
    join_all((0..100).map(|n| brief.check(n))).await;
    until("gone", async || ask(&["keys", &format!("{prefix}:brief:*")]).is_empty()).await;
}

/// What this process has no memory for is let through and does not fill the memory of Redis.
#[tokio::test]
async fn full_memory_bounds_the_keys_in_redis() {
    let prefix = new_prefix();
    let [node, _] = two_nodes(&prefix);
    let limiter: Limiter<u32> = Limiter::new(&node, "reads", per_hour(1), 16);
    for n in 0..500 {
        limiter.check(n).await.unwrap();
    }
    assert!(limiter.let_through() >= 480);
    assert!(ask(&["keys", &format!("{prefix}:*")]).lines().count() <= 16);
}

/// Concurrent checks share calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_checks_are_sent_together() {
    let server = redis::start().unwrap();
    let evaluated = || {
        let stats = redis::ask(server.port(), &["info", "commandstats"]).unwrap();
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    let counters = connect(server.port(), &new_prefix(), PATIENCE);
    let limiter: Limiter<u32> = Limiter::new(&Counters::Redis(counters.clone()), "buys", per_hour(700), 10_000);
    until("connected", async || evaluated() > 0).await;
    let (made, before) = (counters.calls(), evaluated());
    let outcomes = join_all((0..1000).map(|_| limiter.check(1))).await;
    let sent = evaluated() - before;
    eprintln!("1000 concurrent checks: {sent} calls of EVALSHA");
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 700);
    assert_eq!(sent, counters.calls() - made);
    // How many share a call depends on how fast Redis answers; usually it is about fifty.
    assert!(sent <= 200, "{sent}");
}

/// A server that has lost its scripts gets them again.
#[tokio::test]
async fn lost_script_is_loaded_again() {
    let [node, _] = two_nodes(&new_prefix());
    let limiter: Limiter<&str> = Limiter::new(&node, "reads", per_hour(2), 1000);
    limiter.check("a").await.unwrap();
    redis::ask(SERVER.port(), &["script", "flush"]).unwrap();
    limiter.check("a").await.unwrap();
    limiter.check("a").await.unwrap_err();
    assert_eq!(limiter.fallbacks(), 0);
}
