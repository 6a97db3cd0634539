use super::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const OPTIONS: Options = Options { max_batch: 64, queue: 1000, in_flight: 1, abandoned: Abandoned::Keep };

fn permits(n: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(n))
}

/// Answers n with n + 1, and records every batch.
#[derive(Clone, Default)]
struct Adder {
    seen: Arc<SyncMutex<Vec<Vec<u64>>>>,
    gate: Option<Arc<Semaphore>>,
    behave: Option<fn(&[u64]) -> Behaviour>,
}

enum Behaviour {
    Good,
    Panic,
    TooFew,
    Slow,
}

impl Adder {
    /// Waits for a permit before each call.
    fn gated() -> (Self, Arc<Semaphore>) {
        let gate = permits(0);
        (Self { gate: Some(gate.clone()), ..Self::default() }, gate)
    }

    fn counts(&self) -> HashMap<u64, usize> {
        let mut counts = HashMap::new();
        for request in self.seen.lock().iter().flatten() {
            *counts.entry(*request).or_default() += 1;
        }
        counts
    }
}

impl Backend<u64> for Adder {
    type Answer = u64;

    async fn call(&self, batch: &[u64]) -> Vec<u64> {
        self.seen.lock().push(batch.to_vec());
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        match self.behave.map_or(Behaviour::Good, |behave| behave(batch)) {
            Behaviour::Good => {}
            Behaviour::Panic => panic!("on purpose"),
            Behaviour::TooFew => return vec![0; batch.len() - 1],
            Behaviour::Slow => tokio::time::sleep(Duration::from_millis(2)).await,
        }
        batch.iter().map(|n| n + 1).collect()
    }
}

/// Waits until the backend has been called `n` times.
async fn called(adder: &Adder, n: usize) {
    while adder.seen.lock().len() < n {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn single_request_is_a_batch_of_one_without_delay() {
    let adder = Adder::default();
    let batcher = Batcher::new(adder.clone(), OPTIONS, permits(10));
    for n in 0..5 {
        assert_eq!(batcher.submit(n).unwrap().await, Ok(n + 1));
    }
    assert_eq!(*adder.seen.lock(), [[0], [1], [2], [3], [4]]);
}

#[tokio::test]
async fn requests_that_wait_during_a_call_form_the_next_batch() {
    let (adder, gate) = Adder::gated();
    let batcher = Batcher::new(adder.clone(), OPTIONS, permits(1000));
    let first = batcher.submit(0).unwrap();
    called(&adder, 1).await;
    let rest: Vec<_> = (1..=100).map(|n| batcher.submit(n).unwrap()).collect();
    assert_eq!(batcher.waiting(), 100);
    gate.add_permits(3);
    assert_eq!(first.await, Ok(1));
    for (n, ticket) in (1..).zip(rest) {
        assert_eq!(ticket.await, Ok(n + 1));
    }
    let sizes: Vec<usize> = adder.seen.lock().iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, 64, 36], "all that waits, up to the bound");
}

#[tokio::test]
async fn submit_returns_the_request_at_a_bound() {
    let (adder, gate) = Adder::gated();
    let shared = permits(6);
    let options = Options { queue: 4, ..OPTIONS };
    let (one, two) =
        (Batcher::new(adder.clone(), options, shared.clone()), Batcher::new(adder.clone(), options, shared));
    let mut tickets = vec![one.submit(0).unwrap()];
    called(&adder, 1).await;
    tickets.extend((1..=4).map(|n| one.submit(n).unwrap()));
    assert_eq!(one.submit(9).unwrap_err(), Full(9), "its own queue is full");
    tickets.push(two.submit(5).unwrap());
    assert_eq!(two.submit(9).unwrap_err(), Full(9), "the shared bound is reached");
    gate.add_permits(10);
    for ticket in tickets {
        ticket.await.unwrap();
    }
    two.submit(7).unwrap().await.unwrap();
    assert_eq!(adder.counts().get(&9), None, "a refused request never reaches the backend");
}

#[tokio::test]
async fn abandoned_requests_are_dropped_or_carried_out_as_configured() {
    for abandoned in [Abandoned::Drop, Abandoned::Keep] {
        let (adder, gate) = Adder::gated();
        let batcher = Batcher::new(adder.clone(), Options { abandoned, ..OPTIONS }, permits(10));
        let first = batcher.submit(0).unwrap();
        called(&adder, 1).await;
        drop(batcher.submit(1).unwrap());
        let stays = batcher.submit(2).unwrap();
        drop(first); // sent already: settled in any case
        gate.add_permits(9);
        assert_eq!(stays.await, Ok(3));
        batcher.close().await;
        let expected = if abandoned == Abandoned::Drop { vec![vec![0], vec![2]] } else { vec![vec![0], vec![1, 2]] };
        assert_eq!(*adder.seen.lock(), expected);
    }
}

#[tokio::test]
async fn permits_are_returned_with_the_answers() {
    let shared = permits(3);
    let behave = |batch: &[u64]| if batch.contains(&1) { Behaviour::Panic } else { Behaviour::Good };
    let adder = Adder { behave: Some(behave), ..Adder::default() };
    let batcher = Batcher::new(adder, OPTIONS, shared.clone());
    for round in 0..10 {
        let _ = batcher.submit(round % 2).unwrap().await;
    }
    batcher.close().await;
    assert_eq!(shared.available_permits(), 3);
}

#[tokio::test]
async fn closing_answers_every_submitted_request() {
    let (adder, gate) = Adder::gated();
    let batcher = Batcher::new(adder.clone(), OPTIONS, permits(1000));
    let tickets: Vec<_> = (0..200).map(|n| batcher.submit(n).unwrap()).collect();
    gate.add_permits(1000);
    batcher.close().await;
    for (n, ticket) in (0..).zip(tickets) {
        assert_eq!(ticket.await, Ok(n + 1));
    }
}

/// Everything at once, on four threads: a backend that is good, slow, panics or answers wrongly, two calls in flight,
/// callers that go away. Every request reaches the backend exactly once, every caller that stays gets exactly one answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_request_reaches_the_backend_exactly_once_despite_failures() {
    let behave = |batch: &[u64]| match batch[0] % 11 {
        3 => Behaviour::Panic,
        5 => Behaviour::TooFew,
        7 => Behaviour::Slow,
        _ => Behaviour::Good,
    };
    let adder = Adder { behave: Some(behave), ..Adder::default() };
    let options = Options { in_flight: 2, max_batch: 16, ..OPTIONS };
    let batcher = Arc::new(Batcher::new(adder.clone(), options, permits(500)));
    let (good, bad, left) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let tally = Arc::new((good, bad, left));
    let callers: Vec<_> = (0..32u64)
        .map(|caller| {
            let (batcher, tally) = (batcher.clone(), tally.clone());
            tokio::spawn(async move {
                for i in 0..300u64 {
                    let n = caller * 1000 + i;
                    let ticket = loop {
                        match batcher.submit(n) {
                            Ok(ticket) => break ticket,
                            Err(Full(_)) => tokio::task::yield_now().await,
                        }
                    };
                    if n % 13 == 0 {
                        tally.2.fetch_add(1, Ordering::SeqCst);
                        continue; // dropped
                    }
                    match ticket.await {
                        Ok(answer) => {
                            assert_eq!(answer, n + 1, "an answer for another caller");
                            tally.0.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(Unanswered) => _ = tally.1.fetch_add(1, Ordering::SeqCst),
                    }
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    let Ok(batcher) = Arc::try_unwrap(batcher) else { panic!("the batcher is still shared") };
    batcher.close().await;
    let counts = adder.counts();
    assert_eq!(counts.len(), 32 * 300, "none lost");
    assert!(counts.values().all(|&times| times == 1), "none twice");
    let (good, bad, left) =
        (tally.0.load(Ordering::SeqCst), tally.1.load(Ordering::SeqCst), tally.2.load(Ordering::SeqCst));
    assert_eq!(good + bad + left, 32 * 300);
    assert!(good > 0 && bad > 0 && left > 0, "{good} {bad} {left}: the test shows nothing");
}
