//! The public side: TLS, CORS, security headers, slow senders.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::{Method, Request};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use stampede_testkit::{Client, Reply, count};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::shop::{Shop, Storage, TOKEN, command, default_settings, metric, temporary_storage};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_uses_the_configured_certificate() {
    let storage = temporary_storage();
    let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (storage.path().join("cert.pem"), storage.path().join("key.pem"));
    std::fs::write(&certificate, pair.cert.pem()).unwrap();
    std::fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let log = storage.path().join("log");
    let mut command = command(&storage);
    command.env("STAMPEDE__HTTP__TLS_CERTIFICATE", &certificate).env("STAMPEDE__HTTP__TLS_KEY", &key);
    command.env("STAMPEDE__LOG__LEVEL", "warn").stderr(std::fs::File::create(&log).unwrap());
    let shop = Shop::run(command);
    let warning = "every user of this machine can read the TLS key";
    assert!(std::fs::read_to_string(log).unwrap().contains(warning));

    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from(pair.cert.der().to_vec())).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let connector = TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
    let stream = TcpStream::connect(shop.address).await.unwrap();
    let stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
    let mut client = Client::from_stream(stream).await.unwrap();
    let reply = client.get("/v1/sales", "").await.unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("strict-transport-security"), "max-age=31536000");

    assert!(shop.client().await.get("/healthz", "").await.is_err(), "plain HTTP is refused");
    assert!(shop.stop().success());
}

/// Starts the command and returns its standard error.
fn warnings(mut command: Command, storage: &Storage) -> String {
    let log = storage.path().join("log");
    command.env("STAMPEDE__LOG__LEVEL", "warn").stderr(std::fs::File::create(&log).unwrap());
    assert!(Shop::run(command).stop().success());
    std::fs::read_to_string(log).unwrap()
}

#[test]
fn plain_http_on_a_public_address_logs_a_warning() {
    let warning = "unencrypted";
    let storage = temporary_storage();
    let settings = storage.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"10.0.0.0/8\"]\n").unwrap();
    assert!(!warnings(default_settings(&storage), &storage).contains(warning));
    let public = || {
        let mut command = default_settings(&storage);
        command.args(["--admin-listen", "0.0.0.0:0"]);
        command
    };
    assert!(warnings(public(), &storage).contains(warning));
    let mut behind_proxy = public();
    behind_proxy.arg("--config").arg(settings);
    assert!(!warnings(behind_proxy, &storage).contains(warning));
}

/// Responses forbid framing and content sniffing, and text has a character set.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_have_security_headers() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    for path in ["/v1/sales", "/v1/nowhere", "/v1/me", "/healthz", "/openapi.json", "/docs/", "/", "/assets/app.js"] {
        let reply = client.get(path, "").await.unwrap();
        assert_eq!(reply.header("x-frame-options"), "DENY", "{path}");
        assert!(reply.header("content-security-policy").contains("frame-ancestors 'none'"), "{path}");
        assert!(reply.header("content-security-policy").contains("default-src 'none'"), "{path}");
        let kind = reply.header("content-type");
        assert!(!kind.starts_with("text/") || kind.ends_with("; charset=utf-8"), "{path}: {kind}");
    }
    let mut buy = client.post("/v1/sales/1/orders", "", &Value::Null).await.unwrap();
    assert_eq!(buy.header("x-frame-options"), "DENY");
    for path in ["/v1/me", "/admin/v1/sales", "/metrics"] {
        for token in ["", "nonsense"] {
            assert_eq!(buy.status, 401);
            assert_eq!(buy.header("www-authenticate"), "Bearer realm=\"stampede\"", "{path}");
            buy = client.get(path, token).await.unwrap();
        }
    }
}

async fn from_origin(client: &mut Client, method: Method, path: &str, origin: &str) -> Reply {
    let request = Request::builder().method(method).uri(path).header("host", "x").header("origin", origin);
    let request = request.header("access-control-request-method", "POST").body(Default::default()).unwrap();
    client.send(request).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cors_allows_only_configured_origins() {
    let storage = temporary_storage();
    let settings = storage.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ncors_origins = [\"https://shop.example\"]\n").unwrap();
    let mut command = command(&storage);
    command.arg("--config").arg(settings);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let good = from_origin(&mut client, Method::GET, "/v1/sales", "https://shop.example").await;
    assert_eq!(good.header("access-control-allow-origin"), "https://shop.example");
    let asked = from_origin(&mut client, Method::OPTIONS, "/v1/login", "https://shop.example").await;
    assert_eq!((asked.status.as_u16(), asked.header("access-control-allow-origin")), (204, "https://shop.example"));
    for (path, origin) in [("/v1/sales", "https://evil.example"), ("/admin/v1/sales", "https://shop.example")] {
        for method in [Method::GET, Method::OPTIONS] {
            let refused = from_origin(&mut client, method, path, origin).await;
            assert_eq!(refused.header("access-control-allow-origin"), "", "{path} from {origin}");
        }
    }
}

/// The 99th percentile of sequential honest requests.
async fn p99(client: &mut Client, requests: usize) -> Duration {
    let mut times = Vec::with_capacity(requests);
    for _ in 0..requests {
        let started = Instant::now();
        let reply = client.get("/v1/sales", "").await.unwrap();
        assert_eq!(reply.status, 200);
        times.push(started.elapsed());
    }
    times.sort();
    times[requests * 99 / 100]
}

/// Thousands of sockets send their head a byte at a time: connections are limited, and honest requests are hardly affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_senders_do_not_block_others() {
    let (slow, cap) = (count(10_000, 400) as usize, count(8_000, 300) as usize);
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__HTTP__MAX_CONNECTIONS", cap.to_string()).env("STAMPEDE__HTTP__HEAD_TIMEOUT_MS", "120000");
    let shop = Shop::run(command);
    let mut honest = shop.client().await;
    let requests = count(5_000, 500) as usize;
    p99(&mut honest, requests).await; // warm
    let before = p99(&mut honest, requests).await;
    drop(honest);

    let mut sockets = Vec::with_capacity(slow);
    for _ in 0..slow {
        let mut socket = TcpStream::connect(shop.address).await.unwrap();
        // Beyond the limit, older connections are closed, and writing to them may fail.
        let _ = socket.write_all(b"GET /v1/sales HTTP/1.1\r\nx: ").await;
        sockets.push(socket);
    }
    // A connection counts as idle shortly after its last use and is then closed for a new one.
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut honest = loop {
        let mut client = shop.client().await;
        if client.get("/healthz", "").await.is_ok_and(|reply| reply.status == 200) {
            break client;
        }
        assert!(Instant::now() < deadline, "no connection became free");
    };
    let trickle = async {
        loop {
            for socket in &mut sockets {
                let _ = socket.write_all(b"x").await;
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let during = tokio::select! {
        during = p99(&mut honest, requests) => during,
        () = trickle => unreachable!(),
    };
    eprintln!("{slow} slow sockets: honest p99 {before:?} before, {during:?} during");
    if count(1, 0) == 1 {
        // Half a millisecond is allowed for the cost of the slow senders themselves.
        assert!(during <= 2 * before + Duration::from_micros(500), "{before:?} became {during:?}");
    }
    drop(sockets);
    let evicted = metric(&mut honest, "stampede_connections_evicted_total").await;
    let refused = metric(&mut honest, "stampede_connections_refused_total").await;
    assert!(
        evicted >= 1.0 && evicted + refused >= (slow + 1 - cap) as f64,
        "{evicted} made room, {refused} were refused"
    );
    assert_eq!(honest.get("/healthz", TOKEN).await.unwrap().json(), Value::Null);
}
