//! Administrator tokens and certificates: which are accepted, how guesses are limited, what SIGHUP reads again, what is logged.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::{Method, Request};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use stampede_testkit::{Client, Reply};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::shop::{Place, Shop, TOKEN, command, folder, log_in};

const OLD: &str = "old-token-91c7f03be5a84d26c0fe71";
const NEW: &str = "new-token-d48e2b6a07f91c53ab90e4";

/// The server with its log in a file.
fn logging(place: &Place, level: &str) -> (Command, PathBuf) {
    let log = place.path().join("log");
    let mut command = command(place);
    command.env("STAMPEDE__LOG__LEVEL", level).stderr(std::fs::File::create(&log).unwrap());
    (command, log)
}

/// Waits for a line of the log that has all of `words`.
async fn logged(log: &Path, words: &[&str]) -> String {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let text = std::fs::read_to_string(log).unwrap();
        if let Some(line) = text.lines().find(|line| words.iter().all(|word| line.contains(word))) {
            return line.to_owned();
        }
        assert!(Instant::now() < deadline, "no line with {words:?} in\n{text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Does this in turns until it is so.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn status(client: &mut Client, token: &str) -> u16 {
    client.get("/admin/v1/sales", token).await.unwrap().status.as_u16()
}

/// A request for administrators from behind a proxy.
async fn forwarded(client: &mut Client, address: &str, token: &str) -> Reply {
    let request = Request::builder().method(Method::GET).uri("/admin/v1/sales").header("host", "x");
    let request = request.header("x-forwarded-for", address).header("authorization", format!("Bearer {token}"));
    client.send(request.body(Default::default()).unwrap()).await.unwrap()
}

#[test]
fn weak_or_equal_tokens_are_refused_at_start() {
    let folder = folder();
    let start = |token: &str, more: &str| {
        let file = folder.path().join("settings.toml");
        std::fs::write(&file, more).unwrap();
        let mut command = command(&folder);
        let output = command.arg("--config").arg(file).env("STAMPEDE_ADMIN_TOKEN", token).output().unwrap();
        assert!(!output.status.success(), "{token:?} was accepted");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(token.is_empty() || !told.contains(token), "the token is shown: {told}");
        told
    };
    for short in ["", "an-admin-token-for-tests"] {
        assert!(start(short, "").contains("at least 32"), "{short}");
    }
    for weak in ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "0123456789abcdef0123456789abcdef"] {
        let told = start(weak, "");
        assert!(told.contains("too easy to guess") && told.contains("STAMPEDE_ADMIN_TOKEN"), "{told}");
    }
    let file = folder.path().join("second");
    let second = format!("[admin.tokens.omar]\nrole = \"viewer\"\nfile = {file:?}\n");
    std::fs::write(&file, "short").unwrap();
    let told = start(TOKEN, &second);
    assert!(told.contains("\"omar\"") && told.contains("at least 32"), "{told}");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let told = start(TOKEN, &second);
    assert!(told.contains("\"admin\" and \"omar\" have the same token"), "{told}");
}

/// One address guesses: it is stopped and logged; other addresses are unaffected, and administrators behind the same address are not locked out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesses_of_admin_tokens_are_limited_per_address_and_logged() {
    let folder = folder();
    let (mut command, log) = logging(&folder, "info");
    let settings = folder.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").unwrap();
    command.arg("--config").arg(settings).env_remove("STAMPEDE__ADMIN__WRONG_TOKENS_PER_IP__COUNT");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let (attacker, office) = ("203.0.113.7", "203.0.113.8");
    assert_eq!(forwarded(&mut client, office, TOKEN).await.status, 200);
    let mut heard = Vec::new();
    for n in 0..200 {
        let reply = forwarded(&mut client, attacker, &format!("guess-{n}")).await;
        heard.push(reply.status.as_u16());
        if reply.status == 429 {
            assert!(reply.header("retry-after").parse::<u64>().unwrap() >= 1);
        }
    }
    assert_eq!((&heard[..10], &heard[10..12]), (&[401; 10][..], &[429; 2][..]), "ten a minute by default");
    let compared = heard.iter().filter(|status| **status == 401).count();
    assert!(compared <= 20, "{compared} guesses were compared");
    assert_eq!(forwarded(&mut client, attacker, TOKEN).await.status, 429, "also the right token, from there");
    assert_eq!(forwarded(&mut client, office, TOKEN).await.status, 200, "elsewhere nothing has changed");
    for _ in 0..30 {
        forwarded(&mut client, office, "guess").await;
    }
    assert_eq!(forwarded(&mut client, office, TOKEN).await.status, 200, "accepted from there before the guesses");

    let line = logged(&log, &[attacker, "wrong token"]).await;
    assert!(line.contains("WARN") && line.contains("/admin/v1/sales"), "{line}");
    logged(&log, &[attacker, "too many wrong tokens"]).await;
    let line = logged(&log, &["suppressed=", "too many wrong tokens"]).await;
    assert!(!line.contains("suppressed=0"), "{line}");
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("guess-") && !text.contains(TOKEN), "a token is in the log");
    let guesses = shop.metric("stampede_admin_refused_total{reason=\"wrong token\"}").await;
    assert!(guesses >= 20.0, "{guesses}");
}

/// The lines per second are bounded, however many requests there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logins_and_refusals_are_logged_with_the_address_and_bounded() {
    let folder = folder();
    let (command, log) = logging(&folder, "info");
    let shop = Shop::run(command);
    let sale = shop.put_up(1).await;
    let mut client = shop.client().await;
    log_in(&mut client, "13800138000").await;
    let line = logged(&log, &["logged in", "127.0.0.1", "138****8000"]).await;
    assert!(line.contains("/v1/login"), "{line}");
    client.post("/v1/login", "", &json!({ "phone": "13800138001", "code": "123456" })).await.unwrap();
    logged(&log, &["a login was refused", "127.0.0.1", "138****8001", "wrong_code"]).await;

    // Buying takes a way of its own; it is logged alike, with the id that the answer has.
    let reply = client.post(&format!("/v1/sales/{sale}/orders"), "no-such-token", &Value::Null).await.unwrap();
    assert_eq!(reply.status, 401);
    logged(&log, &["a request was refused", "401", "127.0.0.1", reply.header("x-request-id")]).await;
    // A path that is long, so that few lines fill the disk.
    let long = format!("/v1/orders/{}", "9".repeat(10_000));
    let started = Instant::now();
    for n in 0..500 {
        let path = if n % 2 == 0 { "/v1/me" } else { &long };
        assert_eq!(client.get(path, "no-such-token").await.unwrap().status, 401);
    }
    let windows = started.elapsed().as_secs() / 10 + 2;
    logged(&log, &["suppressed=", "buyer refused"]).await;
    let text = std::fs::read_to_string(&log).unwrap();
    let lines = text.lines().filter(|line| line.contains("a request was refused")).count() as u64;
    assert!((20..=20 * windows).contains(&lines), "{lines} lines in {:?}", started.elapsed());
    assert!(text.lines().all(|line| line.len() < 1000), "a line is too long");
    assert!(!text.contains("no-such-token") && !text.contains("13800138000"), "a secret is in the log");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reads_admin_tokens_again() {
    let folder = folder();
    let (file, second) = (folder.path().join("token"), folder.path().join("second"));
    let settings = folder.path().join("settings.toml");
    std::fs::write(&file, OLD).unwrap();
    std::fs::write(&settings, format!("[admin]\ntoken_file = {file:?}\n")).unwrap();
    let (mut command, log) = logging(&folder, "info");
    command.env_remove("STAMPEDE_ADMIN_TOKEN").arg("--config").arg(&settings);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    assert_eq!((status(&mut client, OLD).await, status(&mut client, NEW).await), (200, 401));
    // As most tools write a file.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();

    std::fs::write(&file, format!("{NEW}\n")).unwrap();
    shop.process.signal("HUP").unwrap();
    until("the new token is never accepted", async || status(&mut client, NEW).await == 200).await;
    assert_eq!(status(&mut client, OLD).await, 401, "the old token is no longer accepted");
    logged(&log, &["WARN", "readable by every user of this machine"]).await;

    // What is not right is left alone, and said so.
    std::fs::write(&file, "short").unwrap();
    shop.process.signal("HUP").unwrap();
    let line = logged(&log, &["tokens stay as they were", "at least 32"]).await;
    assert!(line.contains("ERROR") && !line.contains("short"), "{line}");
    assert_eq!(status(&mut client, NEW).await, 200);

    // An administrator who was added to the settings, and one who was taken out.
    std::fs::write(&file, NEW).unwrap();
    std::fs::write(&second, OLD).unwrap();
    let with = format!("[admin]\ntoken_file = {file:?}\n[admin.tokens.omar]\nrole = \"viewer\"\nfile = {second:?}\n");
    std::fs::write(&settings, with).unwrap();
    shop.process.signal("HUP").unwrap();
    until("the second administrator never comes", async || status(&mut client, OLD).await == 200).await;
    std::fs::write(&settings, format!("[admin]\ntoken_file = {file:?}\n")).unwrap();
    shop.process.signal("HUP").unwrap();
    until("the second administrator never goes", async || status(&mut client, OLD).await == 401).await;
    assert!(shop.stop().success());
}

/// The certificate that a new connection is shown, and a client on that connection.
async fn connect_tls(shop: &Shop, trusted: &[&CertificateDer<'static>]) -> (CertificateDer<'static>, Client) {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in trusted {
        roots.add((*certificate).clone()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let connector = TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
    let stream = TcpStream::connect(shop.address).await.unwrap();
    let stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned();
    (shown, Client::over(stream).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reads_the_certificate_again() {
    let folder = folder();
    let (file, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let make = || {
        let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        (CertificateDer::from(pair.cert.der().to_vec()), pair.cert.pem(), pair.signing_key.serialize_pem())
    };
    let write = |certificate: &str, its_key: &str| {
        std::fs::write(&file, certificate).unwrap();
        std::fs::write(&key, its_key).unwrap();
    };
    let ((old, old_pem, old_key), (new, new_pem, new_key)) = (make(), make());
    let trusted = [&old, &new];
    write(&old_pem, &old_key);
    let (mut command, log) = logging(&folder, "info");
    command.env("STAMPEDE__HTTP__TLS_CERTIFICATE", &file).env("STAMPEDE__HTTP__TLS_KEY", &key);
    let shop = Shop::run(command);
    let (shown, mut earlier) = connect_tls(&shop, &trusted).await;
    assert_eq!(shown, old);

    // A key that does not belong to the certificate, as while the files are being written: the old pair stays.
    write(&new_pem, &old_key);
    shop.process.signal("HUP").unwrap();
    let line = logged(&log, &["certificate stays as it was", "do not match"]).await;
    assert!(line.contains("ERROR"), "{line}");
    assert_eq!(connect_tls(&shop, &trusted).await.0, old);

    write(&new_pem, &new_key);
    shop.process.signal("HUP").unwrap();
    until("the new certificate is never shown", async || connect_tls(&shop, &trusted).await.0 == new).await;
    assert_eq!(earlier.get("/v1/sales", "").await.unwrap().status, 200, "an open connection goes on");
    assert!(shop.stop().success());
}
