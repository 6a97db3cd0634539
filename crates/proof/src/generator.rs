//! The crowd: raw HTTP/1.1 connections with one request under way on each, on threads of their own.
//!
//! Nothing of a client library is in the way: a request is a few copied bytes and one write, an answer is one read and a look at
//! its status, its length and the one member that matters. So what is measured is the server.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use stampede_core::OrderId;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::history::Heard;

/// A request that takes longer is given up; what it came to is not known.
const PATIENCE: Duration = Duration::from_secs(30);
/// No answer that we ask for is longer.
const MAX_ANSWER: usize = 64 * 1024;

/// What is sent in a phase: `POST path` with the token of the buyer. The no-op is sent exactly as an order is.
#[derive(Debug)]
pub struct Ask {
    pub path: String,
    pub tokens: Arc<Vec<String>>,
}

impl Ask {
    fn render(&self, buyer: usize, into: &mut Vec<u8>) {
        into.clear();
        into.extend_from_slice(b"POST ");
        into.extend_from_slice(self.path.as_bytes());
        into.extend_from_slice(b" HTTP/1.1\r\nhost: stampede\r\ncontent-length: 0\r\nauthorization: Bearer ");
        into.extend_from_slice(self.tokens[buyer].as_bytes());
        into.extend_from_slice(b"\r\n\r\n");
    }
}

/// Who asks, in which order, and for how long.
#[derive(Debug)]
pub struct Plan {
    pub ask: Ask,
    /// The buyer of each request, in their order; each connection takes the next.
    pub buyers: Vec<u32>,
    pub until: Until,
    /// Requests a second that come whether the server keeps up or not; as fast as it answers without.
    pub rate: Option<f64>,
}

/// When a plan is done.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// Every buyer of the list has had a turn.
    Once,
    /// This time has passed; the list is repeated.
    For(Duration),
    /// Both.
    OnceAndFor(Duration),
}

impl Until {
    /// Is there no turn after this many?
    fn done(self, turns: usize, buyers: usize, elapsed: Duration) -> bool {
        match self {
            Self::Once => turns >= buyers,
            Self::For(span) => elapsed >= span,
            Self::OnceAndFor(span) => turns >= buyers && elapsed >= span,
        }
    }
}

/// One request and what came of it.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub buyer: u32,
    pub heard: Heard,
    pub order: Option<OrderId>,
    /// Of the generator's clock.
    pub start_us: u64,
    pub end_us: u64,
    /// When it should have started: later than that, it waited for the server, and its latency counts from here.
    pub due_us: u64,
}

/// The generator's clock, and how many answers there were so far.
#[derive(Debug)]
pub struct Pulse {
    start: Instant,
    /// Microseconds since 1970 at the start.
    start_us: u64,
    pub answers: AtomicU64,
}

impl Pulse {
    pub fn new() -> Arc<Self> {
        let start_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let start_us = u64::try_from(start_us).unwrap_or(u64::MAX);
        Arc::new(Self { start: Instant::now(), start_us, answers: AtomicU64::new(0) })
    }

    /// A moment in microseconds since 1970, by a clock that does not go back.
    pub fn us(&self, moment: Instant) -> u64 {
        let since = u64::try_from(moment.duration_since(self.start).as_micros()).unwrap_or(u64::MAX);
        self.start_us.saturating_add(since)
    }
}

/// What a plan came to.
#[derive(Debug, Default)]
pub struct Outcome {
    pub samples: Vec<Sample>,
    pub elapsed: Duration,
}

struct Job {
    plan: Arc<Plan>,
    next: Arc<AtomicUsize>,
    begin: Instant,
    done: oneshot::Sender<Vec<Sample>>,
}

/// Connections, kept open from plan to plan.
#[derive(Debug)]
pub struct Crowd {
    /// Dropping them lets the threads end.
    threads: Vec<mpsc::Sender<Job>>,
}

impl Crowd {
    /// Connects to each of the addresses in turn.
    pub async fn connect(
        addresses: &[SocketAddr],
        connections: usize,
        threads: usize,
        pulse: &Arc<Pulse>,
    ) -> io::Result<Self> {
        let mut crowd = Vec::new();
        for thread in 0..threads.max(1) {
            let mine: Vec<SocketAddr> = (thread..connections)
                .step_by(threads.max(1))
                .filter_map(|n| addresses.get(n % addresses.len()).copied())
                .collect();
            let (jobs, todo) = mpsc::channel(1);
            let (ready, connected) = oneshot::channel();
            let pulse = pulse.clone();
            std::thread::Builder::new()
                .name(format!("crowd-{thread}"))
                .spawn(move || work(&mine, todo, ready, &pulse))?;
            connected.await.map_err(|_| io::Error::other("a thread of the crowd ended"))??;
            crowd.push(jobs);
        }
        Ok(Self { threads: crowd })
    }

    /// Carries the plan out. Returns when every request that was sent has been answered.
    pub async fn run(&self, plan: Plan) -> Outcome {
        let (plan, next, begin) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)), Instant::now());
        let start = |jobs: &mpsc::Sender<Job>| {
            let (done, result) = oneshot::channel();
            // A thread that has ended shows as a result that never comes.
            let _ = jobs.try_send(Job { plan: plan.clone(), next: next.clone(), begin, done });
            result
        };
        let results: Vec<_> = self.threads.iter().map(start).collect();
        let mut outcome = Outcome::default();
        for result in results {
            outcome.samples.extend(result.await.unwrap_or_default());
        }
        outcome.elapsed = begin.elapsed();
        outcome
    }
}

fn work(
    addresses: &[SocketAddr],
    mut todo: mpsc::Receiver<Job>,
    ready: oneshot::Sender<io::Result<()>>,
    pulse: &Arc<Pulse>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return drop(ready.send(Err(error))),
    };
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async move {
        let mut connections = Vec::new();
        for address in addresses {
            match Connection::open(*address).await {
                Ok(connection) => connections.push(connection),
                Err(error) => return drop(ready.send(Err(error))),
            }
        }
        // Whoever does not wait for us any more has dropped the crowd.
        let _ = ready.send(Ok(()));
        while let Some(Job { plan, next, begin, done }) = todo.recv().await {
            let tasks: Vec<_> = connections
                .drain(..)
                .map(|connection| {
                    let (plan, next) = (plan.clone(), next.clone());
                    tokio::task::spawn_local(connection.carry_out(plan, next, begin, pulse.clone()))
                })
                .collect();
            let mut samples = Vec::new();
            for task in tasks {
                if let Ok((connection, mine)) = task.await {
                    connections.push(connection);
                    samples.extend(mine);
                }
            }
            let _ = done.send(samples);
        }
    });
}

struct Connection {
    address: SocketAddr,
    /// `None` after it broke.
    stream: Option<TcpStream>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

impl Connection {
    async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = Some(dial(address).await?);
        Ok(Self { address, stream, request: Vec::with_capacity(512), answer: Vec::with_capacity(4096) })
    }

    async fn carry_out(
        mut self,
        plan: Arc<Plan>,
        next: Arc<AtomicUsize>,
        begin: Instant,
        pulse: Arc<Pulse>,
    ) -> (Self, Vec<Sample>) {
        let mut samples = Vec::new();
        loop {
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let Some(&buyer) = plan.buyers.get(turn % plan.buyers.len().max(1)) else { break };
            let done = || plan.until.done(turn, plan.buyers.len(), begin.elapsed());
            if done() {
                break;
            }
            let mut due = Instant::now();
            if let Some(rate) = plan.rate {
                #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 requests")]
                let planned = begin + Duration::from_secs_f64(turn as f64 / rate);
                if planned > due {
                    tokio::time::sleep_until(planned.into()).await;
                    // The timer's own lateness is not the server's.
                    due = Instant::now();
                } else {
                    due = planned;
                }
                if done() {
                    break;
                }
            }
            let start = Instant::now();
            let due = if plan.rate.is_some() { due } else { start };
            let (heard, order) = self.ask(&plan.ask, buyer).await;
            let end = Instant::now();
            pulse.answers.fetch_add(1, Ordering::Relaxed);
            samples.push(Sample {
                buyer,
                heard,
                order,
                start_us: pulse.us(start),
                end_us: pulse.us(end),
                due_us: pulse.us(due),
            });
        }
        (self, samples)
    }

    /// Asks once. A connection that breaks is replaced for the next request.
    async fn ask(&mut self, ask: &Ask, buyer: u32) -> (Heard, Option<OrderId>) {
        ask.render(buyer as usize, &mut self.request);
        if self.stream.is_none() {
            self.stream = dial(self.address).await.ok();
        }
        let Some(stream) = &mut self.stream else {
            // Nobody is there: give it a moment instead of spinning.
            tokio::time::sleep(Duration::from_millis(10)).await;
            return (Heard::Unknown, None);
        };
        match tokio::time::timeout(PATIENCE, exchange(stream, &self.request, &mut self.answer)).await {
            Ok(Ok(answer)) => {
                let heard = judge(&answer, &self.answer);
                if answer.closes {
                    self.stream = None;
                }
                heard
            }
            Ok(Err(_)) | Err(_) => {
                self.stream = None;
                (Heard::Unknown, None)
            }
        }
    }
}

async fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What matters of an answer's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Answer {
    status: u16,
    /// Where its body begins and ends in the buffer.
    body: usize,
    end: usize,
    closes: bool,
}

async fn exchange(stream: &mut TcpStream, request: &[u8], buffer: &mut Vec<u8>) -> io::Result<Answer> {
    stream.write_all(request).await?;
    buffer.clear();
    loop {
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match parse(buffer)? {
            Some(answer) if buffer.len() >= answer.end => return Ok(answer),
            _ if buffer.len() > MAX_ANSWER => return Err(io::ErrorKind::InvalidData.into()),
            _ => {}
        }
    }
}

/// The head of an answer, once all of it is there.
fn parse(buffer: &[u8]) -> io::Result<Option<Answer>> {
    let Some(head) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let text = std::str::from_utf8(&buffer[..head]).map_err(|_| bad())?;
    let mut lines = text.split("\r\n");
    let status = lines.next().and_then(|line| line.get(9..12)?.parse().ok()).ok_or_else(bad)?;
    let (mut length, mut closes) = (0, false);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { return Err(bad()) };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().map_err(|_| bad())?;
        } else if name.eq_ignore_ascii_case("connection") {
            closes = value.trim().eq_ignore_ascii_case("close");
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(bad());
        }
    }
    Ok(Some(Answer { status, body: head + 4, end: head + 4 + length, closes }))
}

/// The text of a member of a small JSON object that we know the shape of.
fn member<'a>(body: &'a [u8], name: &str) -> Option<&'a str> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once(name)?;
    rest.strip_prefix("\":\"")?.split_once('"').map(|(value, _)| value)
}

fn judge(answer: &Answer, buffer: &[u8]) -> (Heard, Option<OrderId>) {
    let body = &buffer[answer.body..answer.end];
    let order = || member(body, "{\"id").and_then(|id| id.parse().ok());
    match answer.status {
        201 => order().map_or((Heard::Wrong, None), |order| (Heard::Created, Some(order))),
        202 => order().map_or((Heard::Wrong, None), |order| (Heard::Pending, Some(order))),
        200 => order().map_or((Heard::Wrong, None), |order| (Heard::Already, Some(order))),
        401 | 404 | 409 | 429 => {
            let refusal = member(body, "\"code").and_then(Heard::refusal);
            (refusal.unwrap_or(Heard::Wrong), None)
        }
        503 => (Heard::Unknown, None),
        _ => (Heard::Wrong, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(answer: &str) -> (Heard, Option<i64>) {
        let parsed = parse(answer.as_bytes()).unwrap().unwrap();
        let (heard, order) = judge(&parsed, answer.as_bytes());
        (heard, order.map(OrderId::get))
    }

    #[test]
    fn answers_are_told_apart() {
        let created = "HTTP/1.1 201 Created\r\nContent-Length: 31\r\n\r\n{\"id\":\"77\",\"already\":false,\"x\":1}";
        assert_eq!(heard(&created[..created.len() - 1]), (Heard::Created, Some(77)));
        let sold_out =
            "HTTP/1.1 409 Conflict\r\ncontent-length: 35\r\n\r\n{\"title\":\"Sold\",\"code\":\"sold_out\"}  ";
        assert_eq!(heard(sold_out), (Heard::SoldOut, None));
        let paused = "HTTP/1.1 409 Conflict\r\ncontent-length: 17\r\n\r\n{\"code\":\"paused\"}";
        assert_eq!(heard(paused), (Heard::Paused, None));
        let strange = "HTTP/1.1 409 Conflict\r\ncontent-length: 16\r\n\r\n{\"code\":\"other\"}";
        assert_eq!(heard(strange), (Heard::Wrong, None));
        assert_eq!(heard("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"), (Heard::Wrong, None));
        assert_eq!(heard("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}"), (Heard::Wrong, None));
        assert_eq!(heard("HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"), (Heard::Unknown, None));
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\ncontent-le").unwrap(), None, "not all there yet");
    }
}
