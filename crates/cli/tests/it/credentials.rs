//! Administrator tokens and certificates: validation, limits on guesses, reload by SIGHUP, logging.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use hyper::{Method, Request};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use stampede_testkit::{Client, Reply, until};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::shop::{Shop, Storage, TOKEN, command, log_in, temporary_storage};

const OLD: &str = "old-token-91c7f03be5a84d26c0fe71";
const NEW: &str = "new-token-d48e2b6a07f91c53ab90e4";

/// The server with its log in a file.
fn logging(storage: &Storage, level: &str) -> (Command, PathBuf) {
    let log = storage.path().join("log");
    let mut command = command(storage);
    command.env("STAMPEDE__LOG__LEVEL", level).stderr(std::fs::File::create(&log).unwrap());
    (command, log)
}

/// Waits for a line of the log that contains all of `words`.
async fn logged(log: &Path, words: &[&str]) -> String {
    let find = || {
        let text = std::fs::read_to_string(log).unwrap();
        text.lines().find(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned)
    };
    until(&format!("a line with {words:?}"), async || find().is_some()).await;
    find().unwrap()
}

async fn status(client: &mut Client, token: &str) -> u16 {
    client.get("/admin/v1/sales", token).await.unwrap().status.as_u16()
}

/// A request to an administration route from behind a proxy.
async fn forwarded(client: &mut Client, address: &str, token: &str) -> Reply {
    let request = Request::builder().method(Method::GET).uri("/admin/v1/sales").header("host", "x");
    let request = request.header("x-forwarded-for", address).header("authorization", format!("Bearer {token}"));
    client.send(request.body(Default::default()).unwrap()).await.unwrap()
}

#[test]
fn weak_or_equal_tokens_are_refused_at_start() {
    let storage = temporary_storage();
    let start = |token: &str, more: &str| {
        let file = storage.path().join("settings.toml");
        std::fs::write(&file, more).unwrap();
        let mut command = command(&storage);
        let output = command.arg("--config").arg(file).env("STAMPEDE_ADMIN_TOKEN", token).output().unwrap();
        assert!(!output.status.success(), "{token:?} was accepted");
        let output = String::from_utf8(output.stderr).unwrap();
        assert!(token.is_empty() || !output.contains(token), "the token is shown: {output}");
        output
    };
    for short in ["", "an-admin-token-for-tests"] {
        assert!(start(short, "").contains("at least 32"), "{short}");
    }
    for weak in [
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "0123456789abcdef0123456789abcdef",
        "changemechangemechangeme-changeme",
    ] {
        let output = start(weak, "");
        assert!(output.contains("too easy to guess") && output.contains("STAMPEDE_ADMIN_TOKEN"), "{output}");
    }
    let file = storage.path().join("second");
    let second = format!("[admin.tokens.omar]\nrole = \"viewer\"\nfile = {file:?}\n");
    std::fs::write(&file, "short").unwrap();
    let output = start(TOKEN, &second);
    assert!(output.contains("\"omar\"") && output.contains("at least 32"), "{output}");
    std::fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let output = start(TOKEN, &second);
    assert!(output.contains("\"admin\" and \"omar\" have the same token"), "{output}");
}

/// Guesses from one address are limited and logged; other addresses are not affected, and administrators behind the same address are not
/// locked out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesses_of_admin_tokens_are_limited_per_address_and_logged() {
    let storage = temporary_storage();
    let (mut command, log) = logging(&storage, "info");
    let settings = storage.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").unwrap();
    command.arg("--config").arg(settings).env_remove("STAMPEDE__ADMIN__WRONG_TOKENS_PER_ADDRESS__COUNT");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let (attacker, office) = ("203.0.113.7", "203.0.113.8");
    assert_eq!(forwarded(&mut client, office, TOKEN).await.status, 200);
    let mut statuses = Vec::new();
    for n in 0..200 {
        let reply = forwarded(&mut client, attacker, &format!("guess-{n}")).await;
        statuses.push(reply.status.as_u16());
        if reply.status == 429 {
            assert!(reply.header("retry-after").parse::<u64>().unwrap() >= 1);
        }
    }
    assert_eq!((&statuses[..10], &statuses[10..12]), (&[401; 10][..], &[429; 2][..]), "ten a minute by default");
    let compared = statuses.iter().filter(|status| **status == 401).count();
    assert!(compared <= 20, "{compared} guesses were compared");
    assert_eq!(forwarded(&mut client, attacker, TOKEN).await.status, 429, "the right token from that address, too");
    assert_eq!(forwarded(&mut client, office, TOKEN).await.status, 200, "other addresses are not affected");
    for _ in 0..30 {
        forwarded(&mut client, office, "guess").await;
    }
    // Its lines are not suppressed because of those about the attacker.
    logged(&log, &[office, "too many wrong tokens"]).await;
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

/// Every login is logged. The number of lines about refusals is limited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logins_and_refusals_are_logged_with_the_address_and_bounded() {
    let storage = temporary_storage();
    let (command, log) = logging(&storage, "info");
    let shop = Shop::run(command);
    let sale = shop.create_sale(1).await;
    let mut client = shop.client().await;
    log_in(&mut client, "13800138000").await;
    let line = logged(&log, &["logged in", "127.0.0.1", "138****8000"]).await;
    assert!(line.contains("/v1/login"), "{line}");
    for n in 0..40 {
        log_in(&mut client, &format!("138001390{n:02}")).await;
    }
    logged(&log, &["logged in", "138****9039"]).await;
    let text = std::fs::read_to_string(&log).unwrap();
    assert_eq!(text.lines().filter(|line| line.contains("logged in")).count(), 41);
    client.post("/v1/login", "", &json!({ "phone": "13800138001", "code": "123456" })).await.unwrap();
    logged(&log, &["a login was refused", "127.0.0.1", "138****8001", "wrong_code"]).await;

    // Buying uses the fast path; it is logged in the same way, with the request id of the response.
    let reply = client.post(&format!("/v1/sales/{sale}/orders"), "no-such-token", &Value::Null).await.unwrap();
    assert_eq!(reply.status, 401);
    logged(&log, &["a request was refused", "401", "127.0.0.1", reply.header("x-request-id")]).await;
    // A long path, so that few lines would fill the disk.
    let long = format!("/v1/orders/{}", "9".repeat(10_000));
    let started = Instant::now();
    for n in 0..500 {
        let path = if n % 2 == 0 { "/v1/me" } else { &long };
        assert_eq!(client.get(path, "no-such-token").await.unwrap().status, 401);
    }
    let windows = started.elapsed().as_secs() / 10 + 2;
    logged(&log, &["suppressed=", "access denied"]).await;
    let text = std::fs::read_to_string(&log).unwrap();
    let lines = text.lines().filter(|line| line.contains("a request was refused")).count() as u64;
    assert!((20..=20 * windows).contains(&lines), "{lines} lines in {:?}", started.elapsed());
    assert!(text.lines().all(|line| line.len() < 1000), "a line is too long");
    assert!(!text.contains("no-such-token") && !text.contains("13800138000"), "a secret is in the log");
}

/// A viewer who changes something, and the login of a disabled account: 403, and a line with the address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_requests_are_logged_with_the_address() {
    const VIEWER: &str = "the-token-of-a-viewer-3b9e07c4a1d2";
    let storage = temporary_storage();
    let (file, settings) = (storage.path().join("viewer"), storage.path().join("settings.toml"));
    std::fs::write(&file, VIEWER).unwrap();
    std::fs::write(&settings, format!("[admin.tokens.vera]\nrole = \"viewer\"\nfile = {file:?}\n")).unwrap();
    let (mut command, log) = logging(&storage, "info");
    command.arg("--config").arg(settings);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let made = client.post("/admin/v1/shops", VIEWER, &json!({ "type_id": "1", "name": "S" })).await.unwrap();
    assert_eq!(made.status, 403);
    let line =
        logged(&log, &["an administrator's request was refused", "viewer only", "127.0.0.1", "/admin/v1/shops"]).await;
    assert!(line.contains("WARN") && line.contains("vera"), "{line}");

    let buyer = log_in(&mut client, "13800138000").await;
    let disabled = client.post(&format!("/admin/v1/users/{}/disable", buyer.id), TOKEN, &Value::Null).await.unwrap();
    assert_eq!(disabled.status, 200);
    let sent = client.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    let login = json!({ "phone": "13800138000", "code": sent.text("demo_code"), "challenge": sent.text("challenge") });
    assert_eq!(client.post("/v1/login", "", &login).await.unwrap().status, 403);
    logged(&log, &["a login was refused", "127.0.0.1", "138****8000", "account_disabled"]).await;
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains(VIEWER) && !text.contains("13800138000"), "a secret is in the log");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reloads_admin_tokens() {
    let storage = temporary_storage();
    let (file, second) = (storage.path().join("token"), storage.path().join("second"));
    let settings = storage.path().join("settings.toml");
    std::fs::write(&file, OLD).unwrap();
    std::fs::write(&settings, format!("[admin]\ntoken_file = {file:?}\n")).unwrap();
    let (mut command, log) = logging(&storage, "info");
    command.env_remove("STAMPEDE_ADMIN_TOKEN").arg("--config").arg(&settings);
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    assert_eq!((status(&mut client, OLD).await, status(&mut client, NEW).await), (200, 401));
    // Written to another file and renamed, as most tools do.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();

    std::fs::write(&file, format!("{NEW}\n")).unwrap();
    shop.process.signal("HUP").unwrap();
    until("the new token is never accepted", async || status(&mut client, NEW).await == 200).await;
    assert_eq!(status(&mut client, OLD).await, 401, "the old token is no longer accepted");
    logged(&log, &["WARN", "readable by every user of this machine"]).await;

    // An invalid file leaves the old tokens in use and is logged.
    std::fs::write(&file, "short").unwrap();
    shop.process.signal("HUP").unwrap();
    let line = logged(&log, &["tokens were not reloaded", "at least 32"]).await;
    assert!(line.contains("ERROR") && !line.contains("short"), "{line}");
    assert_eq!(status(&mut client, NEW).await, 200);

    // One administrator was added to the settings, and one was removed.
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

/// Opens a TLS connection; returns the server's certificate and a client.
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
    (shown, Client::from_stream(stream).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reloads_the_certificate() {
    let storage = temporary_storage();
    let (file, key) = (storage.path().join("cert.pem"), storage.path().join("key.pem"));
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
    let (mut command, log) = logging(&storage, "info");
    command.env("STAMPEDE__HTTP__TLS_CERTIFICATE", &file).env("STAMPEDE__HTTP__TLS_KEY", &key);
    let shop = Shop::run(command);
    let (shown, mut earlier) = connect_tls(&shop, &trusted).await;
    assert_eq!(shown, old);

    // A key that does not match the certificate, as during a replacement of the files: the old pair stays in use.
    write(&new_pem, &old_key);
    shop.process.signal("HUP").unwrap();
    let line = logged(&log, &["certificate was not reloaded", "do not match"]).await;
    assert!(line.contains("ERROR"), "{line}");
    assert_eq!(connect_tls(&shop, &trusted).await.0, old);

    write(&new_pem, &new_key);
    shop.process.signal("HUP").unwrap();
    until("the new certificate is never shown", async || connect_tls(&shop, &trusted).await.0 == new).await;
    assert_eq!(earlier.get("/v1/sales", "").await.unwrap().status, 200, "an open connection stays open");
    assert!(shop.stop().success());
}
