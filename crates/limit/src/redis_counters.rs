//! Counters in Redis, shared by all nodes.
//!
//! | key | type | holds | written by | deleted by |
//! |---|---|---|---|---|
//! | `PREFIX:NAME:KEY` | string | the number of a window since 1970, its count, the count of the window before | `check.lua` | expires at the end of the next window |
//!
//! Time is that of Redis. One task sends the checks: while its call is under way, further checks are queued, and the next call takes all
//! of them. A call that takes too long, or fails, leaves its checks and the queued ones without an answer, and no check waits again
//! until Redis has answered: an overdue call is awaited to its end, and after a failure one check at a time is sent. A check that has waited
//! for the time of two calls, because too many are queued before it, has no answer either and is not sent.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use redis::{FromRedisValue, Value};
use stampede_redis::{Client, Script};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::sliding_window::Counts;

/// The most checks in one call. Redis executes one script at a time, so a call must be short.
const MAX_BATCH: usize = 256;
/// The most checks that wait for the next call. Further ones have no answer.
const MAX_QUEUED: usize = 16 * 1024;
/// How long Redis is not asked after a failed call.
const PAUSE: Duration = Duration::from_millis(100);
/// How often a log line says that Redis does not answer.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

static CHECK: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("lua/check.lua")));

/// How the counters of a request are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A counter counts the request if it passes there and at all counters before.
    Each,
    /// All counters count the request, or none.
    All,
    /// All counters revert the request.
    Undo,
}

impl Kind {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::All => "all",
            Self::Undo => "undo",
        }
    }
}

#[derive(Debug)]
pub(crate) struct KeyLimit {
    pub(crate) key: String,
    pub(crate) maximum: u32,
    pub(crate) window: Duration,
    /// How many requests are counted before this one is decided: they were granted earlier, and held back by the node.
    pub(crate) earlier: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Granted,
    Refused {
        /// Which counter refuses the request.
        place: usize,
        wait: Duration,
        counts: Counts,
    },
}

struct Request {
    kind: Kind,
    keys: Vec<KeyLimit>,
    /// Dropped if there is no answer. Closed if the check has gone.
    reply: oneshot::Sender<Answer>,
}

/// Counters in Redis, and the task that calls it. The task ends when this is dropped.
pub struct RedisCounters {
    prefix: String,
    queue: mpsc::Sender<Request>,
    /// How long a check waits: for the call that is under way, and for its own.
    patience: Duration,
    status: Arc<Status>,
}

impl RedisCounters {
    /// Starts the task. Every key begins with `prefix`. A check has no answer if a call takes longer than `call_timeout`, or if it has
    /// waited for twice that time.
    pub fn start(client: Arc<Client>, prefix: String, call_timeout: Duration) -> Arc<Self> {
        let (queue, requests) = mpsc::channel(MAX_QUEUED);
        let status = Arc::new(Status::new());
        tokio::spawn(Caller { client, call_timeout, status: status.clone(), logged: None }.run(requests));
        Arc::new(Self { prefix, queue, patience: call_timeout * 2, status })
    }

    /// How many calls were made.
    pub fn calls(&self) -> u64 {
        self.status.calls.load(Ordering::Relaxed)
    }

    pub(crate) fn key_prefix(&self, name: &str) -> String {
        format!("{}:{name}:", self.prefix)
    }

    /// `None` if Redis did not answer in time, or is known not to answer.
    pub(crate) async fn check(&self, kind: Kind, keys: Vec<KeyLimit>) -> Option<Answer> {
        timeout(self.patience, self.submit(kind, keys)?).await.ok()?.ok()
    }

    /// Reverts a counted request without waiting. If Redis does not answer, the request stays counted.
    pub(crate) fn undo(&self, keys: Vec<KeyLimit>) {
        drop(self.submit(Kind::Undo, keys));
    }

    fn submit(&self, kind: Kind, keys: Vec<KeyLimit>) -> Option<oneshot::Receiver<Answer>> {
        if !self.status.may_call() {
            return None;
        }
        let (reply, answer) = oneshot::channel();
        self.queue.try_send(Request { kind, keys, reply }).ok()?;
        Some(answer)
    }
}

impl fmt::Debug for RedisCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisCounters").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// Whether Redis answers.
struct Status {
    start: Instant,
    calls: AtomicU64,
    /// Microseconds after `start` until which Redis is not asked; 0 if it answers.
    paused_until_us: AtomicU64,
}

impl Status {
    fn new() -> Self {
        Self { start: Instant::now(), calls: AtomicU64::new(0), paused_until_us: AtomicU64::new(0) }
    }

    fn after(&self, delay: Duration) -> u64 {
        u64::try_from((self.start.elapsed() + delay).as_micros()).unwrap_or(u64::MAX)
    }

    fn may_call(&self) -> bool {
        let until = self.paused_until_us.load(Ordering::Acquire);
        // After the pause a single check is sent; the exchange prolongs the pause for the others until it is answered.
        until == 0
            || self.after(Duration::ZERO) >= until
                && self
                    .paused_until_us
                    .compare_exchange(until, self.after(PAUSE), Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
    }

    fn pause_until_answered(&self) {
        self.paused_until_us.store(u64::MAX, Ordering::Release);
    }

    fn pause(&self) {
        self.paused_until_us.store(self.after(PAUSE), Ordering::Release);
    }

    fn resume(&self) {
        self.paused_until_us.store(0, Ordering::Release);
    }
}

/// The task that calls Redis.
struct Caller {
    client: Arc<Client>,
    call_timeout: Duration,
    status: Arc<Status>,
    /// When a log line last said that Redis does not answer.
    logged: Option<Instant>,
}

impl Caller {
    async fn run(mut self, mut queue: mpsc::Receiver<Request>) {
        // Connects and loads the script, so that the first check need not wait for that.
        self.call(&mut Vec::new(), &mut queue).await;
        let mut batch = Vec::with_capacity(MAX_BATCH);
        while queue.recv_many(&mut batch, MAX_BATCH).await > 0 {
            // The counts of the node have decided about checks that have gone. Nothing waits for an undoing.
            batch.retain(|request| request.kind == Kind::Undo || !request.reply.is_closed());
            if !batch.is_empty() {
                self.call(&mut batch, &mut queue).await;
            }
        }
    }

    /// Calls Redis with all requests of the batch, which is empty then.
    async fn call(&mut self, batch: &mut Vec<Request>, queue: &mut mpsc::Receiver<Request>) {
        let (mut keys, mut args, mut replies) = (Vec::new(), Vec::new(), Vec::with_capacity(batch.len()));
        for Request { kind, keys: limits, reply } in batch.drain(..) {
            args.extend([kind.as_str().to_owned(), limits.len().to_string()]);
            for KeyLimit { key, maximum, window, earlier } in limits {
                args.extend([maximum.to_string(), window.as_micros().to_string(), earlier.to_string()]);
                keys.push(key);
            }
            replies.push(reply);
        }
        let client = self.client.clone();
        let mut call = pin!(client.eval(&CHECK, &keys, &args));
        self.status.calls.fetch_add(1, Ordering::Relaxed);
        let called = match timeout(self.call_timeout, &mut call).await {
            Ok(called) => called,
            Err(_) => {
                self.status.pause_until_answered();
                self.log(&"no answer in time");
                replies.clear();
                // The answer is too late for its callers, but it ends the pause. The client bounds how long it takes.
                loop {
                    tokio::select! {
                        called = &mut call => break called,
                        Some(_unanswered) = queue.recv() => {}
                    }
                }
            }
        };
        match called.map_err(|error| error.to_string()).and_then(read_answers) {
            Ok(answers) => {
                self.status.resume();
                for (reply, answer) in replies.into_iter().zip(answers) {
                    // A caller that has gone does not receive its answer.
                    let _ = reply.send(answer);
                }
            }
            Err(error) => {
                self.status.pause();
                self.log(&error);
                while queue.try_recv().is_ok() {}
            }
        }
    }

    fn log(&mut self, error: &dyn fmt::Display) {
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            self.logged = Some(Instant::now());
            tracing::warn!(%error, "cannot count in Redis: rate limits hold for each node by itself");
        }
    }
}

fn read_answers(value: Value) -> Result<Vec<Answer>, String> {
    let replies = Vec::<Value>::from_redis_value(value).map_err(|error| error.to_string())?;
    replies.into_iter().map(read_answer).collect()
}

fn read_answer(reply: Value) -> Result<Answer, String> {
    if reply == Value::Int(0) {
        return Ok(Answer::Granted);
    }
    let (place, wait_us, window, current, previous) =
        FromRedisValue::from_redis_value(reply).map_err(|error| error.to_string())?;
    let counts = Counts { window, current, previous };
    Ok(Answer::Refused { place, wait: Duration::from_micros(wait_us), counts })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sliding_window::windows_to_wait;
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};
    use stampede_testkit::redis as servers;

    /// The script decides as a window in this process does, with the same counts at the same time.
    #[tokio::test]
    async fn script_has_the_arithmetic_of_the_sliding_window() {
        const WINDOW: Duration = Duration::from_secs(24 * 3600);
        let server = servers::start().unwrap();
        let patience = Duration::from_secs(20);
        let client = Arc::new(Client::new(servers::url(server.port()).into(), patience, patience).unwrap());
        let counters = RedisCounters::start(client.clone(), "test".to_owned(), patience);
        let second = async || {
            let time = client.send(redis::cmd("TIME")).await.unwrap();
            <(u64, u64)>::from_redis_value(time).unwrap().0
        };
        let mut rng = StdRng::seed_from_u64(1);
        for n in 0..300 {
            let (current, previous) = (rng.random_range(0..20), rng.random_range(0..20));
            let maximum = rng.random_range(0..30);
            let (key, window) = (format!("test:{n}"), second().await / WINDOW.as_secs());
            let mut set = redis::cmd("SET");
            set.arg(&key).arg(format!("{window} {current} {previous}"));
            client.send(set).await.unwrap();
            let keys = vec![KeyLimit { key, maximum, window: WINDOW, earlier: 0 }];
            let answer = counters.check(Kind::All, keys).await.unwrap();
            let now = second().await;
            if now / WINDOW.as_secs() != window {
                continue; // midnight
            }
            let elapsed = Duration::from_secs(now % WINDOW.as_secs()).div_duration_f64(WINDOW);
            let expected = windows_to_wait(current, previous, elapsed, maximum);
            let what = format!("{current} {previous} {maximum} at {elapsed}: {answer:?} instead of {expected:?}");
            match (answer, expected) {
                (Answer::Granted, None) => {}
                (Answer::Refused { place: 0, wait, counts }, Some(windows)) => {
                    assert_eq!(counts, Counts { window, current, previous });
                    let expected = WINDOW.mul_f64(windows.max(0.0));
                    assert!(wait.abs_diff(expected) < Duration::from_secs(20), "{what}");
                }
                // At the very second at which the request becomes possible.
                (Answer::Refused { wait, .. }, None) if wait < Duration::from_secs(20) => {}
                _ => panic!("{what}"),
            }
        }
    }
}
