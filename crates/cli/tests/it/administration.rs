//! Administrators, their roles, and the record of what they did.

use std::path::Path;

use hyper::{Method, Request};
use serde_json::{Value, json};

use crate::shop::{Shop, TOKEN, command, folder, log_in};

const VIEWER: &str = "the-token-of-a-viewer";
const SECOND: &str = "the-token-of-a-second-operator";

/// A file with two more administrators.
fn settings(dir: &Path) -> std::path::PathBuf {
    for (name, token) in [("viewer", VIEWER), ("second", SECOND)] {
        std::fs::write(dir.join(name), token).unwrap();
    }
    let file = dir.join("settings.toml");
    let text = format!(
        "[admin.tokens.vera]\nrole = \"viewer\"\nfile = {:?}\n[admin.tokens.omar]\nrole = \"operator\"\nfile = {:?}\n\
         [http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n",
        dir.join("viewer"),
        dir.join("second"),
    );
    std::fs::write(&file, text).unwrap();
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_viewer_changes_nothing_and_every_change_is_on_record() {
    let folder = folder();
    let mut command = command(&folder);
    command.arg("--config").arg(settings(folder.path()));
    let shop = Shop::run(command);
    let sale = shop.put_up(3).await;
    let mut client = shop.client().await;

    for path in ["/admin/v1/sales", "/admin/v1/audit", "/metrics", &format!("/admin/v1/sales/{sale}")] {
        assert_eq!(client.get(path, VIEWER).await.unwrap().status, 200, "{path}");
    }
    let top_up = json!({ "add": 1, "request_id": "r" });
    let shop_body = json!({ "type_id": "1", "name": "S" });
    let changes = [
        ("shops".to_owned(), &shop_body),
        (format!("sales/{sale}/pause"), &Value::Null),
        (format!("sales/{sale}/resume"), &Value::Null),
        (format!("sales/{sale}/end"), &Value::Null),
        (format!("sales/{sale}/top-ups"), &top_up),
    ];
    for (path, body) in &changes {
        let heard = client.post(&format!("/admin/v1/{path}"), VIEWER, body).await.unwrap();
        assert_eq!((heard.status.as_u16(), heard.text("code").as_str()), (403, "forbidden"), "{path}");
    }
    let seen = client.get(&format!("/admin/v1/sales/{sale}"), VIEWER).await.unwrap().json();
    assert_eq!((&seen["status"], &seen["total"]), (&json!("on_sale"), &json!(3)));

    for (path, body) in &changes[1..] {
        client.post(&format!("/admin/v1/{path}"), SECOND, body).await.unwrap();
    }
    let log = client.get("/admin/v1/audit?limit=8", VIEWER).await.unwrap().json();
    let line = |entry: &Value| {
        let text = |member: &str| entry[member].as_str().unwrap().to_owned();
        format!("{} {} {}", text("actor"), text("action"), text("outcome"))
    };
    let mut lines: Vec<String> = log["entries"].as_array().unwrap().iter().map(line).collect();
    lines.reverse();
    assert_eq!(
        lines,
        [
            "omar pause asked",
            "omar pause done",
            "omar resume asked",
            "omar resume done",
            "omar end asked",
            "omar end done",
            "omar top_up asked",
            "omar top_up illegal_step",
        ]
    );
    let oldest = log["entries"][7]["id"].as_str().unwrap();
    let before = client.get(&format!("/admin/v1/audit?before={oldest}&limit=1"), TOKEN).await.unwrap().json();
    assert_eq!(line(&before["entries"][0]), "admin create_sale done");
    assert!(!log.to_string().contains(SECOND) && !log.to_string().contains(VIEWER));
    assert!(shop.stop().success());
}

/// Behind a proxy that is trusted, the limits count the client's address and not the proxy's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_count_the_client_behind_a_trusted_proxy() {
    let folder = folder();
    let mut command = command(&folder);
    command.arg("--config").arg(settings(folder.path())).env("STAMPEDE__LOGIN__PER_IP__COUNT", "2");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let mut ask = async |n: u32, forwarded: &str| {
        let body = json!({ "phone": format!("1380013{n:04}") }).to_string();
        let request = Request::builder().method(Method::POST).uri("/v1/login/codes").header("host", "x");
        let request = request.header("content-type", "application/json").header("x-forwarded-for", forwarded);
        client.send(request.body(body.into()).unwrap()).await.unwrap().status.as_u16()
    };
    assert_eq!([ask(1, "1.1.1.1").await, ask(2, "1.1.1.1").await, ask(3, "1.1.1.1").await], [200, 200, 429]);
    assert_eq!(ask(4, "2.2.2.2").await, 200, "another client");
    assert_eq!(ask(5, "2.2.2.2, 1.1.1.1").await, 429, "what a client writes in front is not believed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_is_named_and_counted() {
    let folder = folder();
    let shop = Shop::open(&folder);
    let mut client = shop.client().await;
    log_in(&mut client, "13800138000").await;
    let (one, two) = (client.get("/healthz", "").await.unwrap(), client.get("/nowhere", "").await.unwrap());
    assert_eq!(one.header("x-request-id").len(), 16);
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
    assert!(shop.metric("stampede_http_requests_total{status=\"404\"}").await >= 1.0);
    assert!(shop.metric("stampede_http_seconds_count").await >= 4.0);
}
