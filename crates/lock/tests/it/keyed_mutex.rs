use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stampede_lock::KeyedMutex;
use stampede_testkit::count;
use tokio::sync::RwLock;

/// Tests that measure the memory of the process take it exclusively; the others share it.
static MEMORY: RwLock<()> = RwLock::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_holder_per_key_at_a_time() {
    let _memory = MEMORY.read().await;
    let locks = KeyedMutex::new();
    let held: Arc<[AtomicU64; 4]> = Arc::default();
    let done = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..64usize)
        .map(|task| {
            let (locks, held, done) = (locks.clone(), held.clone(), done.clone());
            tokio::spawn(async move {
                for round in 0..500usize {
                    let key = (task + round) % 4;
                    let _guard = locks.lock(key).await;
                    assert_eq!(held[key].fetch_add(1, Ordering::SeqCst), 0, "two tasks hold key {key}");
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

/// Waiters are cancelled at arbitrary moments, including the moment at which the lock is handed to them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn cancelled_waiter_does_not_block_the_key() {
    let _memory = MEMORY.read().await;
    let locks = KeyedMutex::new();
    let (cancelled, mut first_cancelled) = tokio::sync::mpsc::channel(1);
    // Held until a waiter was cancelled: tasks that run one after the other would never have to wait.
    let held = locks.lock("key").await;
    let tasks: Vec<_> = (0..64u64)
        .map(|task| {
            let (locks, cancelled) = (locks.clone(), cancelled.clone());
            tokio::spawn(async move {
                for round in 0..300u64 {
                    let timeout = Duration::from_micros((task * 31 + round * 17) % 400);
                    match tokio::time::timeout(timeout, locks.lock("key")).await {
                        Ok(_guard) => tokio::task::yield_now().await,
                        // One message is enough; a full channel holds it already.
                        Err(_) => _ = cancelled.try_send(()),
                    }
                }
            })
        })
        .collect();
    first_cancelled.recv().await.unwrap();
    drop(held);
    for task in tasks {
        task.await.unwrap();
    }
    assert!(locks.try_lock("key").is_some());
    assert!(locks.is_empty());
}

#[tokio::test]
async fn waiters_are_served_in_order_of_arrival() {
    let _memory = MEMORY.read().await;
    let locks = KeyedMutex::new();
    let first = locks.lock(1).await;
    let (sender, mut receiver) = tokio::sync::mpsc::channel(10);
    for turn in 0..10 {
        let (locks, sender) = (locks.clone(), sender.clone());
        tokio::spawn(async move {
            let _guard = locks.lock(1).await;
            sender.send(turn).await.unwrap();
        });
        tokio::task::yield_now().await; // single-threaded: the waiter is queued before the next one starts
    }
    drop((first, sender));
    for turn in 0..10 {
        assert_eq!(receiver.recv().await, Some(turn));
    }
}

#[tokio::test]
async fn panic_of_the_holder_frees_the_lock() {
    let _memory = MEMORY.read().await;
    let locks = KeyedMutex::new();
    let holder = locks.clone();
    let panicked = tokio::spawn(async move {
        let _guard = holder.lock(1).await;
        panic!("on purpose");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(locks.try_lock(1).is_some());
}

/// The queue does not grow if all waiters are cancelled while the lock is held.
#[tokio::test]
async fn cancelled_waiters_use_no_memory() {
    let _memory = MEMORY.write().await;
    let locks = KeyedMutex::new();
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
async fn unused_keys_use_no_memory() {
    let _memory = MEMORY.write().await;
    let locks = KeyedMutex::new();
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
