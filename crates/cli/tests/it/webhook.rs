//! Credentials in the URL of the webhook are sent and never shown.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use serde_json::json;
use stampede_testkit::until;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::shop::{Shop, temporary_storage};

const PASSWORD: &str = "a-very-secret-word";

/// Refuses every request and returns its head.
async fn refusing() -> (SocketAddr, mpsc::Receiver<String>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, received) = mpsc::channel(10);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                assert_ne!(stream.read_buf(&mut head).await.unwrap(), 0, "no whole head");
            }
            tell.send(String::from_utf8_lossy(&head).to_lowercase()).await.unwrap();
            stream.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        }
    });
    (address, received)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn webhook_credentials_are_sent_and_never_shown() {
    let (address, mut received) = refusing().await;
    let (storage, url) = (temporary_storage(), format!("http://me:{PASSWORD}@{address}/codes?token={PASSWORD}"));
    let log = storage.path().join("log");
    let stampede = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        command.args(args).env("STAMPEDE_WEBHOOK_SECRET", "a-secret-of-the-operator");
        command.env("STAMPEDE__LOGIN__SENDER", "webhook").env("STAMPEDE__LOGIN__WEBHOOK_URL", &url);
        command.env("STAMPEDE__LOG__LEVEL", "trace");
        command
    };
    let data = storage.path().to_str().unwrap();
    let mut command = stampede(&["serve", "--listen", "127.0.0.1:0", "--data-dir", data]);
    command.stderr(Stdio::from(std::fs::File::create(&log).unwrap()));
    let shop = Shop::run(command);
    let sent = shop.client().await.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    assert_eq!(sent.status, 200, "{:?}", sent.body);
    let head = received.recv().await.unwrap();
    assert!(head.contains(&format!("\r\nhost: {address}\r\n")), "{head}");
    // me:a-very-secret-word
    assert!(head.contains("\r\nauthorization: basic bwu6ys12zxj5lxnly3jldc13b3jk\r\n"), "{head}");
    let mut shown = String::new();
    until("the refusal is logged", async || {
        shown = std::fs::read_to_string(&log).unwrap();
        shown.contains("403")
    })
    .await;
    shop.stop();
    shown += &std::fs::read_to_string(&log).unwrap();
    for args in [["config", "show"], ["config", "check"]] {
        let output = stampede(&args).output().unwrap();
        assert!(output.status.success());
        shown += &String::from_utf8(output.stdout).unwrap();
    }
    assert!(shown.contains(&format!("http://***@{address}/codes?***")), "{shown}");
    assert!(!shown.contains(PASSWORD) && !shown.contains("bWU6YS12ZXJ5"), "{shown}");
}

/// Every URL in the settings may contain credentials, and `config show` shows none.
#[test]
fn credentials_of_every_url_in_the_settings_are_hidden() {
    let storage = temporary_storage();
    let file = storage.path().join("settings.toml");
    for (section, name) in [
        ("login", "webhook_url"),
        ("alerts", "webhook_url"),
        ("events", "webhook_url"),
        ("payments", "refund_url"),
        ("redis", "url"),
        ("rabbitmq", "url"),
    ] {
        let url = match section {
            "redis" => format!("redis://me:{PASSWORD}@host:6379/2"),
            "rabbitmq" => format!("amqp://me:{PASSWORD}@host:5672/shop"),
            _ => format!("http://me:{PASSWORD}@host/path?token={PASSWORD}"),
        };
        std::fs::write(&file, format!("[{section}]\n{name} = \"{url}\"\n")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        let output = command.args(["config", "show", "--config"]).arg(&file).output().unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && error.is_empty(), "{section}: {error}");
        let (scheme, _) = url.split_once(':').unwrap();
        assert!(shown.contains(&format!("{scheme}://***@host")), "{section}: {shown}");
        assert!(!shown.contains(PASSWORD), "{section}: {shown}");
    }
}

/// The error about an invalid file or URL names the storage without credentials.
#[test]
fn settings_errors_do_not_show_credentials() {
    let storage = temporary_storage();
    let file = storage.path().join("settings.toml");
    for (text, says) in [
        (format!("[login]\nwebhook_url = \"http://me:{PASSWORD}@x/y"), "settings"),
        (format!("[login]\nwebhook_urls = \"http://me:{PASSWORD}@x/y\""), "webhook_urls"),
        (format!("[login]\nwebhook_url = [\"http://me:{PASSWORD}@x/y\"]"), "webhook_url"),
        (format!("[login]\nsender = \"webhook\"\nwebhook_url = \"http://me:{PASSWORD}@x:port/y\""), "webhook_url"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        let output = command.args(["config", "check", "--config"]).arg(&file).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(says), "{text}: {error}");
        assert!(!error.contains(PASSWORD), "{error}");
    }
}
