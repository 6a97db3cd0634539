//! Invalid input to every route: a 4xx problem with a stable code, never a 500 or a hang.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, Request};
use serde_json::json;
use stampede_core::Code;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::contract::{ROUTES, Route};
use crate::shop::{Shop, TOKEN, command, temporary_storage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Anybody,
    Buyer,
    Admin,
}

impl Who {
    fn may_call(route: &Route) -> Self {
        match route.operation["security"][0].as_object() {
            Some(who) if who.contains_key("admin") => Self::Admin,
            Some(_) => Self::Buyer,
            None => Self::Anybody,
        }
    }
}

/// The code of a 4xx problem; anything else fails.
fn problem(what: &str, reply: &stampede_testkit::Reply) -> String {
    assert!(reply.status.is_client_error(), "{what}: {} {:?}", reply.status, reply.body);
    assert_eq!(reply.header("content-type"), "application/problem+json", "{what}");
    let code = reply.text("code");
    assert!(Code::ALL.iter().any(|known| known.as_str() == code), "{what}: unknown code {code:?}");
    assert_eq!(reply.json()["status"].as_u64(), Some(u64::from(reply.status.as_u16())), "{what}");
    code
}

fn request(method: &str, path: &str, token: &str, kind: &str, body: &[u8]) -> Request<Full<Bytes>> {
    let request = Request::builder().method(Method::from_bytes(method.as_bytes()).unwrap()).uri(path);
    let request = request.header("host", "x").header("authorization", format!("Bearer {token}"));
    request.header("content-type", kind).body(Full::from(Bytes::copy_from_slice(body))).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_rejects_invalid_input() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(command);
    let sale = shop.create_sale(5).await;
    let buyer = shop.log_in(0, 1).await.remove(0);
    let mut client = shop.client().await;
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    let bodies: [&[u8]; 14] = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\"text\"",
        b"{}",
        b"\xff\xfe\x00",
        b"{\"phone\": 13800138000}",
        b"{\"phone\":\"13800138000\",\"phone\":\"13800138000\",\"x\":1}",
        b"{\"add\": -1, \"request_id\": \"a\"}",
        b"{\"add\": 99999999999999999999, \"request_id\": \"a\"}",
        b"{\"type_id\": \"0\", \"name\": \"\\u0000\"}",
        b"{\"voucher_id\":\"1\",\"stock\":0,\"begin\":\"yesterday\",\"end\":\"2026-01-01\"}",
        deep.as_bytes(),
    ];
    let ids =
        ["0", "-1", "01", "9223372036854775808", "1e3", "abc", "%00", "%ff", "..%2f", "1234567890123456789012345"];

    for route in ROUTES.iter() {
        let (method, path, who) = (route.method.as_str(), route.path.as_str(), Who::may_call(route));
        let token = match who {
            Who::Anybody => "",
            Who::Buyer => buyer.token.as_str(),
            Who::Admin => TOKEN,
        };
        // Missing permission is reported before any other error.
        let wrong = if who == Who::Admin { vec!["", "x", buyer.token.as_str()] } else { vec!["", "x", TOKEN] };
        for wrong in wrong.iter().filter(|_| who != Who::Anybody) {
            let real = path.replace("{id}", &sale.to_string());
            let reply = client.send(request(method, &real, wrong, "application/json", b"{}")).await.unwrap();
            assert_eq!(problem(path, &reply), "unauthorized", "{method} {path}");
        }
        for id in ids.iter().filter(|_| path.contains("{id}")) {
            let real = path.replace("{id}", id);
            let body = br#"{"add":1,"request_id":"a"}"#;
            let reply = client.send(request(method, &real, token, "application/json", body)).await.unwrap();
            problem(&format!("{method} {real}"), &reply);
        }
        let takes_body = route.operation["requestBody"].is_object();
        // A body that may be left out may also be empty.
        let needs_body = route.operation["requestBody"]["required"] == true;
        let is_empty = |body: &[u8]| [&b""[..], b"null", b"{}"].contains(&body);
        for body in bodies.iter().filter(|body| takes_body && (needs_body || !is_empty(body))) {
            let real = path.replace("{id}", &sale.to_string());
            let what = format!("{method} {path} {:?}", String::from_utf8_lossy(&body[..body.len().min(60)]));
            let reply = client.send(request(method, &real, token, "application/json", body)).await.unwrap();
            problem(&what, &reply);
        }
        if takes_body {
            let real = path.replace("{id}", &sale.to_string());
            let reply = client.send(request(method, &real, token, "text/plain", b"{}")).await.unwrap();
            assert_eq!(problem(path, &reply), "unsupported_media_type");
            let huge = vec![b' '; 100_000];
            let reply = client.send(request(method, &real, token, "application/json", &huge)).await.unwrap();
            assert_eq!(problem(path, &reply), "payload_too_large");
            client = shop.client().await; // the rest of a refused body is not read: such a connection ends
        }
        if method == "GET"
            && ["/v1/sales", "/v1/shops", "/v1/orders", "/admin/v1/sales", "/admin/v1/audit"].contains(&path)
        {
            for query in ["limit=0", "limit=101", "limit=x", "before=0", "nonsense=1", "limit=%ff", "before=1&before=2"]
            {
                let reply = client.get(&format!("{path}?{query}"), token).await.unwrap();
                assert_eq!(problem(query, &reply), "invalid_request");
            }
        }
        let reply = client.send(request("PATCH", &path.replace("{id}", "1"), token, "text/plain", b"")).await.unwrap();
        assert_eq!(problem(path, &reply), "method_not_allowed", "{path}");
    }
    for nowhere in ["/nowhere", "/v1", "/v1/", "/admin", "/v1/sales/1/2/3", "/%2e%2e/etc/passwd", "//", "/v1/sales/"] {
        let reply = client.get(nowhere, "").await.unwrap();
        assert_eq!(problem(nowhere, &reply), "not_found", "{nowhere}");
    }
    // Afterwards the server still sells.
    let reply = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &json!(null)).await.unwrap();
    assert_eq!(reply.status, 201, "{reply:?}");
    assert!(shop.stop().success());
}

/// Sends raw bytes and reads the response until the connection is closed.
async fn raw(shop: &Shop, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(shop.address).await.unwrap();
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut response = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut response)).await;
    let _reset_is_an_answer_too = read.expect("the server hangs");
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_http_is_rejected() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__HTTP__HEAD_TIMEOUT_MS", "2000");
    let shop = Shop::run(command);
    let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "a".repeat(100_000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "x-a: b\r\n".repeat(1000));
    for (bytes, status) in [
        ("NONSENSE\r\n\r\n", "400"),
        ("GET / HTTP/9.9\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\nbad header\r\n\r\n", "400"),
        ("POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", "400"),
        (long.as_str(), "4"),
        (many.as_str(), "431"),
    ] {
        let response = raw(&shop, bytes.as_bytes()).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {status}")), "{:?}: {response}", &bytes[..bytes.len().min(40)]);
    }
    // An incomplete head and a silent connection are closed.
    for slow in ["GET / HTTP/1.1\r\nhost:", ""] {
        let response = raw(&shop, slow.as_bytes()).await;
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408"), "{response}");
    }
    // A missing body.
    let response = raw(
        &shop,
        b"POST /v1/login HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
    )
    .await;
    assert!(response.starts_with("HTTP/1.1 408") && response.contains("request_timeout"), "{response}");
    assert!(shop.stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_header_must_be_single_and_valid() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let buying = "POST /v1/sales/1/orders HTTP/1.1\r\n";
    for (head, hosts) in [
        ("GET /v1/sales HTTP/1.1\r\n", ""),
        ("GET /v1/sales HTTP/1.1\r\n", "host: x\r\nhost: x\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host:\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: a b\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: user@x\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: x/y\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: x:y\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: x:99999\r\n"),
        ("GET /v1/sales HTTP/1.1\r\n", "host: [::1\r\n"),
        ("GET http://x/v1/sales HTTP/1.1\r\n", ""),
        ("GET /v1/sales HTTP/1.0\r\n", "host: x\r\nhost: y\r\n"),
        (buying, ""),
        (buying, "host: x\r\nhost: y\r\n"),
        ("OPTIONS /v1/login HTTP/1.1\r\n", ""),
    ] {
        let response = raw(&shop, format!("{head}{hosts}connection: close\r\n\r\n").as_bytes()).await;
        assert!(
            response.starts_with("HTTP/1.1 400") || response.starts_with("HTTP/1.0 400"),
            "{head:?} {hosts:?}: {response}"
        );
        assert!(
            response.contains("\"invalid_request\"") && response.contains("Host"),
            "{head:?} {hosts:?}: {response}"
        );
    }
    for good in ["GET /v1/sales HTTP/1.1\r\nhost: [::1]:8080\r\n", "GET /v1/sales HTTP/1.0\r\n"] {
        let response = raw(&shop, format!("{good}connection: close\r\n\r\n").as_bytes()).await;
        assert!(response.contains(" 200 OK"), "{good:?}: {response}");
    }
}

/// An array with the right values in the right order is not accepted as the object.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn array_is_not_accepted_as_an_object() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    for (path, token, body) in [
        ("/v1/login/codes", "", json!(["13800138000"])),
        ("/v1/login", "", json!(["13800138000", "123456"])),
        ("/admin/v1/shops", TOKEN, json!(["1", "Tea", "Here"])),
    ] {
        let reply = shop.client().await.post(path, token, &body).await.unwrap();
        assert_eq!(problem(path, &reply), "invalid_request", "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invisible_and_misleading_names_are_rejected() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    for bad in
        [" ", "\u{3000}\u{3000}", "\u{200b}", "Tea\u{202e}eeffoC", "\u{2066}Tea\u{2069}", "Tea\u{61c}", "Tea\u{fff9}"]
    {
        let reply = shop.admin("shops", &json!({ "type_id": "1", "name": bad })).await;
        assert_eq!(problem(bad, &reply), "invalid_request", "{bad:?}");
        assert_eq!(reply.json()["errors"][0]["member"], "name", "{:?}", reply.body);
        let voucher = json!({ "shop_id": "1", "kind": "ordinary", "title": bad, "price_cents": 1, "worth_cents": 1 });
        let reply = shop.admin("vouchers", &voucher).await;
        assert_eq!(problem(bad, &reply), "invalid_request", "{bad:?}");
    }
}
