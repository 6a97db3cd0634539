use super::*;
use proptest::prelude::*;

fn limit(count: u32, window_ms: u64) -> Limit {
    Limit { count, window: Duration::from_millis(window_ms) }
}

/// A client that waits as told succeeds, wherever in the window the limit was reached.
#[test]
fn request_succeeds_after_the_returned_wait() {
    for count in [1, 2, 3, 20] {
        for first_ms in [0, 1, 500, 999] {
            let limits = SlidingWindow::new(limit(count, 1000), 100);
            let at = Duration::from_millis;
            for _ in 0..count {
                limits.check_at("a", count, at(first_ms)).unwrap();
            }
            let refused = at(first_ms);
            let wait = limits.check_at("a", count, refused).unwrap_err();
            assert!(limits.check_at("a", count, refused + wait.mul_f64(0.99)).is_err(), "{count} {first_ms} {wait:?}");
            assert_eq!(
                limits.check_at("a", count, refused + wait + Duration::from_micros(10)),
                Ok(()),
                "{count} {first_ms}"
            );
        }
    }
}

#[test]
fn keys_are_counted_separately() {
    let limits = SlidingWindow::new(limit(3, 60_000), 100);
    for _ in 0..3 {
        limits.check("a").unwrap();
    }
    let wait = limits.check("a").unwrap_err();
    assert!(wait > Duration::ZERO && wait <= Duration::from_secs(120));
    limits.check("b").unwrap();
}

#[test]
fn peek_counts_nothing() {
    let limits = SlidingWindow::new(limit(1, 60_000), 100);
    for _ in 0..3 {
        limits.peek("a").unwrap();
    }
    limits.check("a").unwrap();
    assert!(limits.peek("a").is_err());
    limits.peek("b").unwrap();
}

#[test]
fn check_up_to_applies_its_own_maximum() {
    let limits = SlidingWindow::new(limit(4, 60_000), 100);
    limits.check_up_to("share", 2).unwrap();
    limits.check_up_to("share", 2).unwrap();
    limits.check_up_to("share", 2).unwrap_err();
    limits.check("share").unwrap();
}

#[test]
fn undo_frees_a_request() {
    let limits = SlidingWindow::new(limit(2, 1000), 100);
    let at = Duration::from_millis;
    limits.undo(&"a"); // never counted, so nothing to revert
    for ms in [0, 10] {
        limits.check_at("a", 2, at(ms)).unwrap();
    }
    limits.check_at("a", 2, at(20)).unwrap_err();
    limits.undo_at(&"a", at(30));
    limits.check_at("a", 2, at(40)).unwrap();
    // A request counted in the previous window can be reverted, too.
    limits.check_at("a", 2, at(1010)).unwrap_err();
    limits.undo_at(&"a", at(1020));
    limits.check_at("a", 2, at(1030)).unwrap();
}

/// Every third request is sent to Redis, with the two before it. While Redis has not answered, nothing more is held back. A request that was
/// reverted is not sent later.
#[test]
fn requests_are_held_back_and_sent_together() {
    let limits = SlidingWindow::aligned(limit(100, 3_600_000), 1000);
    let count = |key| limits.try_count(key, 2).unwrap();
    let third = [Granted::Held, Granted::Held, Granted::Send { earlier: 2 }];
    for _ in 0..3 {
        assert_eq!([(); 3].map(|()| count("a")), third);
        assert_eq!([(); 3].map(|()| count("a")), [Granted::Send { earlier: 0 }; 3], "under way");
        limits.end_sending(&"a", 2, true);
    }
    assert_eq!([(); 3].map(|()| count("a")), third);
    limits.end_sending(&"a", 2, false);
    assert_eq!(count("a"), Granted::Send { earlier: 2 }, "not counted, and sent again");
    assert_eq!(count("b"), Granted::Held);
    limits.undo(&"b");
    assert_eq!([(); 3].map(|()| count("b")), third);
    assert_eq!(SlidingWindow::aligned(limit(1, 1000), 0).try_count("a", 2), Ok(Granted::LetThrough));
}

#[test]
fn counts_of_another_node_replace_a_counted_request() {
    let limits = SlidingWindow::aligned(limit(5, 3_600_000), 1000);
    let (window, _) = limits.window_at(limits.clock.now());
    let counted = |key| {
        let shard = limits.shard(&key, window);
        [&shard.current, &shard.previous].map(|counts| counts.get(key).map_or(0, |count| count.all))
    };
    assert_eq!(limits.try_count("a", 0), Ok(Granted::Send { earlier: 0 }));
    limits.replace(&"a", Counts { window, current: 5, previous: 2 });
    assert_eq!(counted("a"), [5, 2]);
    limits.check("a").unwrap_err();
    // A lower count than that of this process, and counts of another window, change nothing.
    limits.count("b");
    limits.count("b");
    limits.replace(&"b", Counts { window, current: 0, previous: 0 });
    assert_eq!(counted("b"), [1, 0]);
    limits.count("b");
    limits.replace(&"b", Counts { window: window + 1, current: 5, previous: 5 });
    assert_eq!(counted("b"), [1, 0]);
    // Beyond the limit.
    for _ in 0..10 {
        limits.count("c");
    }
    assert_eq!(counted("c"), [10, 0]);
}

#[test]
fn clock_that_is_set_back_does_not_keep_counts() {
    let limits = SlidingWindow::aligned(limit(1, 1000), 100);
    let now = limits.clock.now();
    let year = Duration::from_secs(365 * 24 * 3600);
    limits.check_at("a", 1, now + year).unwrap();
    limits.check_at("a", 1, now + year).unwrap_err();
    limits.check_at("a", 1, now).unwrap();
    limits.check_at("a", 1, now).unwrap_err();
    limits.check_at("a", 1, now.saturating_sub(Duration::from_millis(1000))).unwrap_err();
}

#[test]
fn requests_of_new_keys_are_let_through_when_the_memory_is_full() {
    let limits = SlidingWindow::new(limit(1, 60_000), 16);
    for key in 0..10_000 {
        limits.check(key).unwrap();
    }
    assert!(limits.let_through() >= 10_000 - 32);
    let held: usize = limits.shards.iter().map(|shard| shard.lock().current.len()).sum();
    assert!(held <= 16);
}

proptest! {
    /// At most the limit passes in an aligned window, and at most twice the limit in any interval of that length.
    #[test]
    fn at_most_twice_the_limit_passes_in_any_interval(count in 1..20u32, gaps in proptest::collection::vec(0..400u64, 1..300)) {
        let limits = SlidingWindow::new(limit(count, 1000), 10);
        let (mut at_ms, mut passed) = (0, Vec::new());
        for gap in gaps {
            at_ms += gap;
            if limits.check_at((), count, Duration::from_millis(at_ms)).is_ok() {
                passed.push(at_ms);
            }
        }
        for (i, &from) in passed.iter().enumerate() {
            let interval = passed[i..].iter().take_while(|&&t| t < from + 1000).count();
            prop_assert!(interval <= 2 * count as usize);
            let window = passed.iter().filter(|&&t| t / 1000 == from / 1000).count();
            prop_assert!(window <= count as usize);
        }
    }
}
