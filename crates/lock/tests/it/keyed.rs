use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stampede_lock::Keyed;
use stampede_testkit::count;
use tokio::sync::RwLock;

/// Tests that measure the process's memory run alone; the others share.
static QUIET: RwLock<()> = RwLock::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_at_a_time_for_each_key() {
    let _quiet = QUIET.read().await;
    let locks = Keyed::new();
    let held: Arc<[AtomicU64; 4]> = Arc::default();
    let done = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..64usize)
        .map(|task| {
            let (locks, held, done) = (locks.clone(), held.clone(), done.clone());
            tokio::spawn(async move {
                for round in 0..500usize {
                    let key = (task + round) % 4;
                    let _guard = locks.lock(key).await;
                    assert_eq!(held[key].fetch_add(1, Ordering::SeqCst), 0, "two hold key {key}");
                    if round % 7 == 0 {
                        tokio::task::yield_now().await;
                    }
                    held[key].fetch_sub(1, Ordering::SeqCst);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(done.load(Ordering::SeqCst), 64 * 500);
    assert!(locks.is_empty());
}

/// Waiters give up at every moment, also in the very one in which the lock is handed to them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_waiter_that_gives_up_keeps_nobody_out() {
    let _quiet = QUIET.read().await;
    let locks = Keyed::new();
    let gave_up = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..64u64)
        .map(|task| {
            let (locks, gave_up) = (locks.clone(), gave_up.clone());
            tokio::spawn(async move {
                for round in 0..300u64 {
                    let patience = Duration::from_micros((task * 31 + round * 17) % 400);
                    match tokio::time::timeout(patience, locks.lock("key")).await {
                        Ok(_guard) => tokio::task::yield_now().await,
                        Err(_) => _ = gave_up.fetch_add(1, Ordering::SeqCst),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(gave_up.load(Ordering::SeqCst) > 0, "nobody gave up: the test shows nothing");
    assert!(locks.try_lock("key").is_some());
    assert!(locks.is_empty());
}

#[tokio::test]
async fn first_come_first_served() {
    let _quiet = QUIET.read().await;
    let locks = Keyed::new();
    let first = locks.lock(1).await;
    let (told, mut heard) = tokio::sync::mpsc::channel(10);
    for turn in 0..10 {
        let (locks, told) = (locks.clone(), told.clone());
        tokio::spawn(async move {
            let _guard = locks.lock(1).await;
            told.send(turn).await.unwrap();
        });
        tokio::task::yield_now().await; // one thread: the waiter is in the line before the next one starts
    }
    drop((first, told));
    for turn in 0..10 {
        assert_eq!(heard.recv().await, Some(turn));
    }
}

#[tokio::test]
async fn a_panic_while_holding_frees_the_lock() {
    let _quiet = QUIET.read().await;
    let locks = Keyed::new();
    let holder = locks.clone();
    let panicked = tokio::spawn(async move {
        let _guard = holder.lock(1).await;
        panic!("on purpose");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(locks.try_lock(1).is_some());
}

/// A line of waiters that all give up does not grow while its holder holds on.
#[tokio::test]
async fn those_who_give_up_leave_no_trace() {
    let _quiet = QUIET.write().await;
    let locks = Keyed::new();
    let before = resident_bytes();
    let guard = locks.lock(0).await;
    for _ in 0..count(2_000_000, 200_000) {
        let waiting = locks.lock(0);
        tokio::pin!(waiting);
        let once = std::future::poll_fn(|context| std::task::Poll::Ready(waiting.as_mut().poll(context)));
        assert!(once.await.is_pending());
    }
    drop(guard);
    assert!(locks.is_empty());
    assert!(resident_bytes() < before + 16_000_000, "grew from {before} to {}", resident_bytes());
}

#[tokio::test]
async fn millions_of_keys_leave_nothing_behind() {
    let _quiet = QUIET.write().await;
    let locks = Keyed::new();
    for key in 0..1_000u64 {
        drop(locks.lock(key).await);
    }
    let before = resident_bytes();
    for key in 0..count(10_000_000, 1_000_000) {
        drop(locks.lock(key).await);
    }
    assert!(locks.is_empty());
    let after = resident_bytes();
    assert!(after < before + 8_000_000, "grew from {before} to {after} bytes");
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
