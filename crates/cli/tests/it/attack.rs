//! One address opens as many connections as it can, with default settings, while honest requests come from another.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stampede_testkit::{Client, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use crate::shop::{Shop, Storage, TOKEN, default_settings, metric, temporary_storage};

const LANES: usize = 16;
/// What an attacker sends on each connection, in turn: a complete request, one without its body, half a head.
const SENT: [&str; 3] = [
    "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
    "POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n",
    "GET /v1/sales HT",
];

/// A connection from an address of this machine that is not the attacker's.
async fn honest_stream(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((Ipv4Addr::new(127, 0, 0, 2), 0).into()).unwrap();
    socket.connect(address).await.unwrap()
}

pub async fn honest(address: SocketAddr) -> Client {
    Client::from_stream(honest_stream(address).await).await.unwrap()
}

/// Opens a connection, sends a request, and reads the response to a complete one.
async fn open(address: SocketAddr, number: usize) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let sent = SENT[number % SENT.len()];
    stream.write_all(sent.as_bytes()).await.ok()?;
    if sent.starts_with("GET /healthz") {
        let mut response = [0; 2048];
        stream.read(&mut response).await.ok().filter(|&read| read > 0)?;
    }
    Some(stream)
}

/// 127.0.0.1 opens as many connections as it can and keeps them; those that the server closes are opened again.
struct Attack {
    lanes: Vec<JoinHandle<()>>,
    tried: Arc<AtomicUsize>,
}

impl Attack {
    fn start(address: SocketAddr, connections: usize) -> Self {
        let tried = Arc::new(AtomicUsize::new(0));
        let lane = |first: usize| {
            let tried = tried.clone();
            tokio::spawn(async move {
                let mut held: Vec<Option<TcpStream>> = (0..connections / LANES).map(|_| None).collect();
                loop {
                    for (n, slot) in held.iter_mut().enumerate() {
                        let is_open = slot.as_ref().is_some_and(|stream| {
                            let closed = stream.try_read(&mut [0; 2048]).is_ok_and(|read| read == 0);
                            !closed && stream.peer_addr().is_ok()
                        });
                        if !is_open {
                            *slot = open(address, first + n).await;
                        }
                        tried.fetch_add(1, Ordering::Relaxed);
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            })
        };
        Self { lanes: (0..LANES).map(lane).collect(), tried }
    }

    /// Waits until every connection has been attempted once.
    async fn wait_until_started(&self, connections: usize) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while self.tried.load(Ordering::Relaxed) < connections / LANES * LANES {
            assert!(Instant::now() < deadline, "the attack did not start");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.lanes.iter().for_each(JoinHandle::abort);
    }
}

/// Honest requests on new connections: the number of successful ones, and the longest latency.
async fn honest_requests(address: SocketAddr, requests: usize) -> (usize, Duration) {
    let (mut served, mut longest) = (0, Duration::ZERO);
    for _ in 0..requests {
        let started = Instant::now();
        let reply = honest(address).await.get("/v1/sales", "").await.expect("an honest request was not answered");
        assert!([200, 503].contains(&reply.status.as_u16()), "{reply:?}");
        served += usize::from(reply.status == 200);
        longest = longest.max(started.elapsed());
    }
    (served, longest)
}

/// Raises the file limit of this process; returns how many connections it can open.
fn raise_own_limit(wanted: u64) -> usize {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let most = limit.maximum.unwrap_or(u64::MAX).saturating_sub(500);
    wanted.min(most) as usize
}

async fn open_connections(shop: &Shop) -> f64 {
    metric(&mut honest(shop.address).await, "stampede_connections_open").await
}

/// The maximum latency of an honest request: far above the usual one, and far below that of a server without free connections.
const MAX_LATENCY: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_address_cannot_take_all_connections() {
    let storage = temporary_storage();
    let shop = Shop::run(default_settings(&storage));
    let connections = raise_own_limit(10_500);
    let attack = Attack::start(shop.address, connections);
    attack.wait_until_started(connections).await;
    let (served, longest) = honest_requests(shop.address, 90).await;
    let open = open_connections(&shop).await;
    eprintln!(
        "{connections} connections tried, {open} open: {served} of 90 honest requests served, longest {longest:?}"
    );
    assert_eq!(served, 90);
    assert!(longest < MAX_LATENCY, "{longest:?}");
    assert!(open > 500.0, "{open}: there was no attack");
    assert!(open <= 1_000.0 + 20.0, "one address holds {open} connections");
    drop(attack);
    assert!(shop.stop().success());
}

/// The command `serve` with these limits of open files.
fn with_descriptors(soft: u32, hard: u32, storage: &Storage) -> Command {
    let serve = default_settings(storage);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={soft}:{hard}")).arg("--").arg(serve.get_program()).args(serve.get_args());
    for (name, value) in serve.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_requests_are_served_with_few_descriptors() {
    let storage = temporary_storage();
    let log = storage.path().join("log");
    let mut command = with_descriptors(1_024, 1_024, &storage);
    command.stderr(std::fs::File::create(&log).unwrap());
    let shop = Shop::run(command);
    let connections = raise_own_limit(3_000);
    let attack = Attack::start(shop.address, connections);
    attack.wait_until_started(connections).await;
    let (served, longest) = honest_requests(shop.address, 90).await;
    eprintln!("1,024 descriptors: {served} of 90 honest requests served, longest {longest:?}");
    assert_eq!(served, 90);
    assert!(longest < MAX_LATENCY, "{longest:?}");
    drop(attack);
    assert!(shop.stop().success());
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("http.max_connections is lowered") && log.contains("max_connections=800"), "{log}");
    assert!(!log.contains("cannot accept"), "there are descriptors for every connection:\n{log}");
}

#[test]
fn file_limit_is_raised_at_start() {
    let storage = temporary_storage();
    let shop = Shop::run(with_descriptors(256, 4_096, &storage));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", shop.process.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().nth(3), Some("4096"), "{line}");
}

/// Idle connections are closed for new ones; those with an open request are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connection_is_closed_for_a_new_one() {
    let storage = temporary_storage();
    let mut command = default_settings(&storage);
    command.env("STAMPEDE__HTTP__MAX_CONNECTIONS", "8").env("STAMPEDE__HTTP__MAX_CONNECTIONS_PER_ADDRESS", "8");
    let shop = Shop::run(command);
    let mut idle = Vec::new();
    for _ in 0..8 {
        idle.push(open(shop.address, 0).await.unwrap());
    }
    wait_until_served(&shop).await;
    // The oldest was closed; the newest is still open.
    assert_eq!(idle[0].read(&mut [0; 2048]).await.unwrap(), 0);
    idle[7].write_all(SENT[0].as_bytes()).await.unwrap();
    assert!(idle[7].read(&mut [0; 2048]).await.unwrap() > 0);

    drop(idle);
    // The server has noticed, so that it closes none of the next ones for want of room. The one that asks is open.
    // Until then, the one that asks may be closed for want of room itself.
    until("the closed connections are gone", async || {
        let metrics = honest(shop.address).await.get("/metrics", TOKEN).await;
        metrics.is_ok_and(|reply| String::from_utf8_lossy(&reply.body).contains("stampede_connections_open 1\n"))
    })
    .await;
    let mut busy = Vec::new();
    for _ in 0..8 {
        busy.push(open(shop.address, 1).await.unwrap());
    }
    // A connection without a request counts as idle by then; these have one, so none of them is closed.
    tokio::time::sleep(Duration::from_millis(500)).await;
    // Their bodies never arrive: until the server times them out, new connections are refused at once.
    let deadline = Instant::now() + Duration::from_secs(4);
    let refused = loop {
        let started = Instant::now();
        // Without an HTTP client: the refusal arrives before the request is sent.
        let (mut stream, mut response) = (honest_stream(shop.address).await, String::new());
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        stream.read_to_string(&mut response).await.unwrap();
        if response.starts_with("HTTP/1.1 503") {
            break (response, started.elapsed());
        }
        assert!(Instant::now() < deadline, "eight open requests and still no refusal");
    };
    assert!(refused.0.contains("retry-after: 1\r\n") && refused.0.contains("\"busy\""), "{}", refused.0);
    assert!(refused.1 < MAX_LATENCY, "{:?}", refused.1);
    // A closed connection makes room at once.
    drop(busy);
    wait_until_served(&shop).await;
}

/// A connection counts as idle shortly after its last use.
async fn wait_until_served(shop: &Shop) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !honest(shop.address).await.get("/healthz", "").await.is_ok_and(|reply| reply.status == 200) {
        assert!(Instant::now() < deadline, "no connection became free");
    }
}

/// If descriptors run out for another reason, idle connections are closed, and a warning is logged at intervals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_are_closed_when_descriptors_run_out() {
    let storage = temporary_storage();
    let log = storage.path().join("log");
    let mut command = default_settings(&storage);
    command.stderr(std::fs::File::create(&log).unwrap());
    let shop = Shop::run(command);
    let pid = shop.process.pid();
    let held = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let limit = format!("--nofile={0}:{0}", held + 8);
    assert!(Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap().success());
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(open(shop.address, 0).await.expect("a connection was not served"));
    }
    let (served, longest) = honest_requests(shop.address, 10).await;
    assert_eq!(served, 10);
    assert!(longest < MAX_LATENCY, "{longest:?}");
    drop(idle);
    assert!(shop.stop().success());
    let log = std::fs::read_to_string(log).unwrap();
    let complaints = log.lines().filter(|line| line.contains("cannot accept a connection")).count();
    assert!((1..=4).contains(&complaints), "{complaints} lines about accepting:\n{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trusted_proxy_is_exempt_from_the_limit_per_address() {
    for (proxies, held) in [("", 4), ("trusted_proxies = [\"127.0.0.1\"]\n", 12)] {
        let storage = temporary_storage();
        let settings = storage.path().join("settings.toml");
        std::fs::write(&settings, format!("[http]\nmax_connections_per_address = 4\n{proxies}")).unwrap();
        let mut command = default_settings(&storage);
        command.arg("--config").arg(settings);
        let shop = Shop::run(command);
        let mut connections = Vec::new();
        for _ in 0..12 {
            connections.push(open(shop.address, 0).await.unwrap());
        }
        // The connection that reads the metrics is included.
        assert_eq!(open_connections(&shop).await, f64::from(held + 1), "{proxies:?}");
    }
}
