//! The load generator: raw HTTP/1.1 connections with one request at a time on each, on separate threads.
//!
//! It uses no HTTP library, so that its own cost is small: a request is a few copied bytes and one write; of a response only the status,
//! the length and one member of the body are parsed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use stampede_core::OrderId;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::history::Response;

/// A request that takes longer is abandoned, and its outcome is unknown.
const TIMEOUT: Duration = Duration::from_secs(30);
/// A longer response is an error.
const MAX_RESPONSE: usize = 64 * 1024;

/// The request of a phase: `POST path` with the buyer's token. The no-op request has the same headers as an order.
#[derive(Debug)]
pub struct RequestTemplate {
    pub path: String,
    pub tokens: Arc<Vec<String>>,
}

impl RequestTemplate {
    fn render(&self, buyer: usize, into: &mut Vec<u8>) {
        into.clear();
        into.extend_from_slice(b"POST ");
        into.extend_from_slice(self.path.as_bytes());
        into.extend_from_slice(b" HTTP/1.1\r\nhost: stampede\r\ncontent-length: 0\r\nauthorization: Bearer ");
        into.extend_from_slice(self.tokens[buyer].as_bytes());
        into.extend_from_slice(b"\r\n\r\n");
    }
}

/// Which buyers send requests, in which order, and for how long.
#[derive(Debug)]
pub struct Plan {
    pub request: RequestTemplate,
    /// The buyer of each request, in order; each connection takes the next one.
    pub buyers: Vec<u32>,
    pub until: Until,
    /// Open loop: requests per second, independent of the server's speed. `None`: each connection sends its next request after the
    /// response to the previous one.
    pub rate: Option<f64>,
}

/// When a plan ends.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// After one request per entry of the list.
    Once,
    /// After this time; the list is repeated.
    For(Duration),
    /// Both.
    OnceAndFor(Duration),
}

impl Until {
    /// Whether the plan ends after this many requests.
    fn done(self, turns: usize, buyers: usize, elapsed: Duration) -> bool {
        match self {
            Self::Once => turns >= buyers,
            Self::For(span) => elapsed >= span,
            Self::OnceAndFor(span) => turns >= buyers && elapsed >= span,
        }
    }
}

/// One request and its response.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub buyer: u32,
    pub response: Response,
    pub order: Option<OrderId>,
    /// By the run clock.
    pub start_us: u64,
    pub end_us: u64,
    /// When the request was scheduled. Latency counts from here, so that waiting for the server is included.
    pub due_us: u64,
}

/// The clock of a run, and the number of responses so far, all of them and those that confirm a new order.
#[derive(Debug)]
pub struct RunClock {
    start: Instant,
    /// Microseconds since the Unix epoch at the start.
    start_us: u64,
    pub responses: AtomicU64,
    pub confirmed: AtomicU64,
}

impl RunClock {
    pub fn new() -> Arc<Self> {
        let start_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let start_us = u64::try_from(start_us).unwrap_or(u64::MAX);
        Arc::new(Self { start: Instant::now(), start_us, responses: AtomicU64::new(0), confirmed: AtomicU64::new(0) })
    }

    /// An instant in microseconds since the Unix epoch, by a monotonic clock.
    pub fn us(&self, moment: Instant) -> u64 {
        let since = u64::try_from(moment.duration_since(self.start).as_micros()).unwrap_or(u64::MAX);
        self.start_us.saturating_add(since)
    }
}

/// The result of a plan.
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

/// Open connections, reused from plan to plan.
#[derive(Debug)]
pub struct LoadGenerator {
    /// The threads end when these are dropped.
    threads: Vec<mpsc::Sender<Job>>,
}

impl LoadGenerator {
    /// Distributes the connections over the addresses and the threads.
    pub async fn connect(
        addresses: &[SocketAddr],
        connections: usize,
        threads: usize,
        clock: &Arc<RunClock>,
    ) -> io::Result<Self> {
        let mut senders = Vec::new();
        for thread in 0..threads.max(1) {
            let mine: Vec<SocketAddr> = (thread..connections)
                .step_by(threads.max(1))
                .filter_map(|n| addresses.get(n % addresses.len()).copied())
                .collect();
            let (jobs, jobs_rx) = mpsc::channel(1);
            let (ready, connected) = oneshot::channel();
            let clock = clock.clone();
            std::thread::Builder::new()
                .name(format!("load-{thread}"))
                .spawn(move || run_thread(&mine, jobs_rx, ready, &clock))?;
            connected.await.map_err(|_| io::Error::other("a load generator thread ended"))??;
            senders.push(jobs);
        }
        Ok(Self { threads: senders })
    }

    /// Runs the plan and returns when every request has its response.
    pub async fn run(&self, plan: Plan) -> Outcome {
        let (plan, next, begin) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)), Instant::now());
        let start = |jobs: &mpsc::Sender<Job>| {
            let (done, result) = oneshot::channel();
            // A thread that has ended never sends its result.
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

fn run_thread(
    addresses: &[SocketAddr],
    mut jobs_rx: mpsc::Receiver<Job>,
    ready: oneshot::Sender<io::Result<()>>,
    clock: &Arc<RunClock>,
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
        // The receiver is gone if the generator was dropped.
        let _ = ready.send(Ok(()));
        while let Some(Job { plan, next, begin, done }) = jobs_rx.recv().await {
            let tasks: Vec<_> = connections
                .drain(..)
                .map(|connection| {
                    let (plan, next) = (plan.clone(), next.clone());
                    tokio::task::spawn_local(connection.execute(plan, next, begin, clock.clone()))
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
    /// `None` after an error.
    stream: Option<TcpStream>,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl Connection {
    async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = Some(connect(address).await?);
        Ok(Self { address, stream, request: Vec::with_capacity(512), response: Vec::with_capacity(4096) })
    }

    async fn execute(
        mut self,
        plan: Arc<Plan>,
        next: Arc<AtomicUsize>,
        begin: Instant,
        clock: Arc<RunClock>,
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
                    // The delay of the timer itself is not counted.
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
            let (response, order) = self.send(&plan.request, buyer).await;
            let end = Instant::now();
            clock.responses.fetch_add(1, Ordering::Relaxed);
            if response.is_new_order() {
                clock.confirmed.fetch_add(1, Ordering::Relaxed);
            }
            samples.push(Sample {
                buyer,
                response,
                order,
                start_us: clock.us(start),
                end_us: clock.us(end),
                due_us: clock.us(due),
            });
        }
        (self, samples)
    }

    /// Sends one request. A broken connection is replaced before the next one.
    async fn send(&mut self, template: &RequestTemplate, buyer: u32) -> (Response, Option<OrderId>) {
        template.render(buyer as usize, &mut self.request);
        if self.stream.is_none() {
            self.stream = connect(self.address).await.ok();
        }
        let Some(stream) = &mut self.stream else {
            // The server is down: a pause avoids a busy loop.
            tokio::time::sleep(Duration::from_millis(10)).await;
            return (Response::Unknown, None);
        };
        match tokio::time::timeout(TIMEOUT, exchange(stream, &self.request, &mut self.response)).await {
            Ok(Ok(head)) => {
                let response = classify(&head, &self.response);
                if head.closes {
                    self.stream = None;
                }
                response
            }
            Ok(Err(_)) | Err(_) => {
                self.stream = None;
                (Response::Unknown, None)
            }
        }
    }
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The relevant parts of the head of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ResponseHead {
    status: u16,
    /// Where the body begins and ends in the buffer.
    body: usize,
    end: usize,
    closes: bool,
}

async fn exchange(stream: &mut TcpStream, request: &[u8], buffer: &mut Vec<u8>) -> io::Result<ResponseHead> {
    stream.write_all(request).await?;
    buffer.clear();
    loop {
        if stream.read_buf(buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match parse(buffer)? {
            Some(head) if buffer.len() >= head.end => return Ok(head),
            _ if buffer.len() > MAX_RESPONSE => return Err(io::ErrorKind::InvalidData.into()),
            _ => {}
        }
    }
}

/// Parses the head of a response. Returns `None` while it is incomplete.
fn parse(buffer: &[u8]) -> io::Result<Option<ResponseHead>> {
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
    Ok(Some(ResponseHead { status, body: head + 4, end: head + 4 + length, closes }))
}

/// The value of a string member in a small JSON object of known shape.
fn json_string<'a>(body: &'a [u8], name: &str) -> Option<&'a str> {
    let text = std::str::from_utf8(body).ok()?;
    let (_, rest) = text.split_once(name)?;
    rest.strip_prefix("\":\"")?.split_once('"').map(|(value, _)| value)
}

fn classify(head: &ResponseHead, buffer: &[u8]) -> (Response, Option<OrderId>) {
    let body = &buffer[head.body..head.end];
    let order = || json_string(body, "{\"id").and_then(|id| id.parse().ok());
    match head.status {
        201 => order().map_or((Response::Wrong, None), |order| (Response::Created, Some(order))),
        202 => order().map_or((Response::Wrong, None), |order| (Response::Pending, Some(order))),
        200 => order().map_or((Response::Wrong, None), |order| (Response::Already, Some(order))),
        401 | 404 | 409 | 429 => {
            let refusal = json_string(body, "\"code").and_then(Response::refusal);
            (refusal.unwrap_or(Response::Wrong), None)
        }
        503 => (Response::Unknown, None),
        _ => (Response::Wrong, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(text: &str) -> (Response, Option<i64>) {
        let parsed = parse(text.as_bytes()).unwrap().unwrap();
        let (response, order) = classify(&parsed, text.as_bytes());
        (response, order.map(OrderId::get))
    }

    #[test]
    fn responses_are_classified() {
        let created = "HTTP/1.1 201 Created\r\nContent-Length: 31\r\n\r\n{\"id\":\"77\",\"already\":false,\"x\":1}";
        assert_eq!(classified(&created[..created.len() - 1]), (Response::Created, Some(77)));
        let sold_out =
            "HTTP/1.1 409 Conflict\r\ncontent-length: 35\r\n\r\n{\"title\":\"Sold\",\"code\":\"sold_out\"}  ";
        assert_eq!(classified(sold_out), (Response::SoldOut, None));
        let paused = "HTTP/1.1 409 Conflict\r\ncontent-length: 17\r\n\r\n{\"code\":\"paused\"}";
        assert_eq!(classified(paused), (Response::Paused, None));
        let unknown = "HTTP/1.1 409 Conflict\r\ncontent-length: 16\r\n\r\n{\"code\":\"other\"}";
        assert_eq!(classified(unknown), (Response::Wrong, None));
        assert_eq!(classified("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"), (Response::Wrong, None));
        assert_eq!(classified("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}"), (Response::Wrong, None));
        assert_eq!(classified("HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"), (Response::Unknown, None));
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\ncontent-le").unwrap(), None, "incomplete head");
    }
}
