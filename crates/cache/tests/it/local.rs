//! A cache without Redis.

use std::convert::Infallible;
use std::io::{Error as IoError, ErrorKind};
use std::sync::Arc;
use std::time::Duration;

use stampede_cache::{Builder, Cache, Error};
use stampede_testkit::{count, redis};

use crate::support::{Numbers, Source, node, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_callers_share_one_load_and_its_result_is_cached() {
    let (cache, source): (Numbers, _) = (Builder::new("numbers").build(), Source::default());
    source.set(1, 11);
    for (key, value) in [(1, Some(11)), (2, None)] {
        let before = source.calls();
        let wants: Vec<_> = (0..1000)
            .map(|_| {
                let (cache, source) = (cache.clone(), source.clone());
                tokio::spawn(async move { source.get(&cache, key).await })
            })
            .collect();
        for want in wants {
            assert_eq!(want.await.unwrap(), value);
        }
        assert_eq!(source.calls(), before + 1);
    }
    let stats = cache.stats();
    assert_eq!((stats.loads, stats.misses), (2, 2));
    assert!(stats.coalesced + stats.local_hits + stats.empty_hits >= 1900, "{stats:?}");
    // Cached absence expires.
    let short: Numbers = Builder::new("numbers").expire_empty_after(Duration::from_millis(50)).build();
    assert_eq!(source.get(&short, 3).await, None);
    source.set(3, 33);
    until("the cached absence expires", || async { source.get(&short, 3).await == Some(33) }).await;
}

#[tokio::test]
async fn errors_are_returned_and_not_cached() {
    let cache: Cache<u64, u64, IoError> = Builder::new("numbers").build();
    let fail = || async { Err(IoError::from(ErrorKind::NotFound)) };
    let failed = cache.get_or_load(&1, fail).await.unwrap_err();
    assert!(matches!(&failed, Error::Source(error) if error.kind() == ErrorKind::NotFound), "{failed}");
    assert_eq!(*cache.get_or_load(&1, || async { Ok(Some(11)) }).await.unwrap().unwrap(), 11);
    let panicked = cache.get_or_load(&2, || async { panic!("intentional failure") }).await.unwrap_err();
    assert!(matches!(panicked, Error::Panicked));
    assert_eq!(*cache.get_or_load(&2, || async { Ok(Some(22)) }).await.unwrap().unwrap(), 22);
}

/// Callers time out; the load continues, and later callers get its value.
#[tokio::test]
async fn load_continues_after_its_callers_have_timed_out() {
    let cache: Cache<u64, u64, Infallible> =
        Builder::new("numbers").wait_timeout(Duration::from_millis(50)).load_timeout(Duration::from_secs(5)).build();
    let slow = || async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(Some(11))
    };
    assert!(matches!(cache.get_or_load(&1, slow).await, Err(Error::Timeout)));
    let dropped =
        tokio::time::timeout(Duration::from_millis(10), cache.get_or_load(&1, || async { unreachable!() })).await;
    assert!(dropped.is_err());
    until("the value is loaded", || async { cache.get_or_load(&1, || async { unreachable!() }).await.is_ok() }).await;
    assert_eq!(cache.stats().loads, 1);
}

#[tokio::test]
async fn stale_value_is_returned_at_once_and_refreshed_once() {
    let (source, settings) = (Source::default(), Builder::new("numbers").jitter(0.0));
    let cache: Numbers = settings.refresh_after(Duration::from_millis(100)).build();
    source.set(1, 11);
    assert_eq!(source.get(&cache, 1).await, Some(11));
    source.set(1, 12);
    tokio::time::sleep(Duration::from_millis(150)).await;
    for _ in 0..100 {
        assert_eq!(source.get(&cache, 1).await, Some(11), "the stale value is returned");
    }
    until("the new value is returned", || async { source.get(&cache, 1).await == Some(12) }).await;
    assert_eq!(source.calls(), 2);
    assert!(cache.stats().stale_hits >= 100);
}

#[tokio::test]
async fn readers_after_a_change_get_the_new_value() {
    let (cache, source): (Numbers, _) = (Builder::new("numbers").build(), Source::default());
    source.set(1, 11);
    assert_eq!(source.get(&cache, 1).await, Some(11));
    let changed = cache.update(&1, {
        let source = source.clone();
        async move {
            source.set(1, 12);
            Ok::<_, Infallible>("done")
        }
    });
    assert_eq!(changed.await, Ok("done"));
    assert_eq!(source.get(&cache, 1).await, Some(12));

    // A load that begins before the change and ends after it.
    cache.invalidate(&1).await;
    let old = tokio::spawn({
        let (cache, source) = (cache.clone(), source.clone());
        async move { cache.get_or_load(&1, move || source.read(1, Duration::from_millis(200))).await.unwrap() }
    });
    until("the load has started", || async { source.calls() == 3 }).await;
    source.set(1, 13);
    cache.invalidate(&1).await;
    assert_eq!(source.get(&cache, 1).await, Some(13), "the load in progress is not joined");
    assert_eq!(old.await.unwrap().map(|value| *value), Some(12));
    assert_eq!(source.get(&cache, 1).await, Some(13), "the result of the old load is not cached");
}

/// If the expiry window is divided into 100 parts, no part has more than 3 % of the values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_loaded_together_expire_at_different_times() {
    let keys = count(100_000, 10_000);
    let server = redis::start().unwrap();
    let day = Duration::from_secs(24 * 60 * 60);
    let cache = Arc::new(node(server.port(), |settings| settings.expire_after(day).jitter(0.1).local(10, day)).await);
    let loaders: Vec<_> = (0..16)
        .map(|part| {
            let cache = cache.clone();
            tokio::spawn(async move {
                let keys = (0..keys).filter(move |key| key % 16 == part);
                cache.warm(keys, |key| async move { Ok(Some(key)) }).await.unwrap();
            })
        })
        .collect();
    for loader in loaders {
        loader.await.unwrap();
    }
    let script = "local all = {} for _, key in ipairs(redis.call('KEYS', 'test:cache:*')) do all[#all + 1] = redis.call('PTTL', key) end return all";
    // Values are stored in the background, after `warm` has returned.
    until("all are stored", || async { redis::ask(server.port(), &["dbsize"]).unwrap() == keys.to_string() }).await;
    let left = redis::ask(server.port(), &["--raw", "eval", script, "0"]).unwrap();
    let left: Vec<u64> = left.lines().map(|ms| ms.parse().unwrap()).collect();
    assert_eq!(left.len() as u64, keys);
    let (first, last) = (left.iter().min().unwrap(), left.iter().max().unwrap());
    assert!(u128::from(last - first) > day.as_millis() * 9 / 100, "the window is too narrow: {first} to {last}");
    let mut parts = [0u64; 101];
    for ms in &left {
        parts[usize::try_from((ms - first) * 100 / (last - first)).unwrap()] += 1;
    }
    let busiest = parts.iter().max().unwrap();
    assert!(busiest * 100 <= keys * 3, "{busiest} of {keys} expire together");
}

#[tokio::test]
async fn maximum_durations_do_not_overflow() {
    let (source, ever) = (Source::default(), Duration::MAX);
    let settings =
        Builder::new("numbers").jitter(f64::NAN).expire_after(ever).refresh_after(ever).expire_empty_after(ever);
    let cache: Numbers = settings.local(10, ever).wait_timeout(ever).build();
    source.set(1, 11);
    assert_eq!((source.get(&cache, 1).await, source.get(&cache, 2).await), (Some(11), None));
    cache.invalidate(&1).await;
    assert_eq!(source.get(&cache, 1).await, Some(11));
}

#[test]
#[should_panic(expected = "is not a valid name for a cache")]
fn cache_name_with_special_characters_is_rejected() {
    let _ = Builder::new("user:profile");
}
