//! Rate limits, a buyer's orders, edits of a sale, and login codes by webhook.

use hyper::Method;
use serde_json::{Value, json};
use stampede_testkit::{Client, until};

use crate::shop::{Shop, TOKEN, command, ledger, log_in, temporary_storage};

async fn state(client: &mut Client, sale: &str) -> (String, u64) {
    let seen = client.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    (seen.text("state"), seen.json()["remaining"].as_u64().unwrap_or(99))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rate_limit_sets_retry_after() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__BUY__PER_USER__COUNT", "2");
    let shop = Shop::run(command);
    let sale = shop.create_sale(1).await;
    let mut client = shop.client().await;
    let buyer = log_in(&mut client, "13800138000").await;
    let mut replies = Vec::new();
    for _ in 0..3 {
        replies.push(client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap());
    }
    assert_eq!(replies.iter().map(|reply| reply.status.as_u16()).collect::<Vec<_>>(), [201, 200, 429]);
    let wait: u64 = replies[2].header("retry-after").parse().unwrap();
    // Two in a window of 10 s: until half of the next window has passed.
    assert!((10..=15).contains(&wait), "{wait}");
    for _ in 0..2 {
        client.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    }
    let limited = client.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    assert_eq!((limited.status.as_u16(), limited.text("code").as_str()), (429, "too_many_requests"));
}

/// A path with a percent-encoded id does not take the fast path.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routed_buying_has_the_metrics_and_refusals_of_the_fast_path() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1).await.to_string();
    let mut client = shop.client().await;
    let [one, two] = [log_in(&mut client, "13800138000").await, log_in(&mut client, "13800138001").await];
    let fast = format!("/v1/sales/{sale}/orders");
    let routed = format!("/v1/sales/%3{sale}/orders");
    let mut replies = Vec::new();
    for (path, token) in [
        (&routed, one.token.as_str()),
        (&fast, &one.token),
        (&routed, &one.token),
        (&fast, &two.token),
        (&routed, &two.token),
        (&fast, "nonsense"),
        (&routed, "nonsense"),
    ] {
        replies.push(client.post(path, token, &Value::Null).await.unwrap());
    }
    let statuses: Vec<_> = replies.iter().map(|reply| reply.status.as_u16()).collect();
    assert_eq!(statuses, [201, 200, 200, 409, 409, 401, 401]);
    assert!(replies[..3].iter().all(|reply| reply.text("id") == replies[0].text("id")));
    for (answer, count) in [("created", 1.0), ("already", 2.0), ("sold_out", 2.0), ("unauthorized", 2.0)] {
        let name = format!("stampede_buy_answers_total{{answer=\"{answer}\"}}");
        assert_eq!(shop.metric(&name).await, count, "{answer}");
    }
    assert_eq!(shop.metric("stampede_http_seconds_count{route=\"/v1/sales/{id}/orders\"}").await, 7.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_route_has_a_rate_limit() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    for limit in ["LIMITS__READS_PER_ADDRESS", "LIMITS__OWN_PER_USER", "BUY__PER_USER"] {
        command.env(format!("STAMPEDE__{limit}__COUNT"), "3").env(format!("STAMPEDE__{limit}__WINDOW_MS"), "3600000");
    }
    let shop = Shop::run(command);
    let (mut client, sale) = (shop.client().await, shop.create_sale(5).await);
    let [one, two] = [log_in(&mut client, "13800138000").await, log_in(&mut client, "13800138001").await];
    let buy = format!("/v1/sales/{sale}/orders");
    for (method, paths, token) in [
        (Method::GET, ["/v1/sales", "/v1/shops", "/v1/shop-types", "/v1/sales"], ""),
        (Method::GET, ["/v1/orders", "/v1/me", "/v1/sessions", "/v1/orders"], &one.token),
        (Method::POST, [&buy, &buy, &buy, &buy], &one.token),
    ] {
        let mut replies = Vec::new();
        for path in paths {
            replies.push(client.call(method.clone(), path, token, &Value::Null).await.unwrap());
        }
        let last = replies.pop().unwrap();
        assert!(replies.iter().all(|reply| reply.status.is_success()), "{replies:?}");
        assert_eq!((last.status.as_u16(), last.text("code").as_str()), (429, "too_many_requests"));
        let wait: u64 = last.header("retry-after").parse().unwrap();
        // Until a third of the next window has passed.
        assert!((4700..=4800).contains(&wait), "{wait}");
    }
    assert_eq!(client.get("/v1/orders", &two.token).await.unwrap().status, 200, "limits are per user");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_visible_to_its_owner_and_cancelled_once() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1).await;
    let mut client = shop.client().await;
    let (alice, bob) = (log_in(&mut client, "13800138000").await, log_in(&mut client, "13800138001").await);
    let orders = format!("/v1/sales/{sale}/orders");
    let bought = client.post(&orders, &alice.token, &Value::Null).await.unwrap();
    assert_eq!(bought.status, 201);
    let order = bought.text("id");
    assert_eq!(bought.header("location"), format!("/v1/orders/{order}"));
    assert_eq!(client.post(&orders, &bob.token, &Value::Null).await.unwrap().text("code"), "sold_out");

    let (one, cancel) = (format!("/v1/orders/{order}"), format!("/v1/orders/{order}/cancel"));
    for (path, method) in [(&one, Method::GET), (&cancel, Method::POST)] {
        let replies = client.call(method, path, &bob.token, &Value::Null).await.unwrap();
        assert_eq!(replies.text("code"), "no_such_order", "the response does not reveal that the order exists");
    }
    let seen = client.get(&one, &alice.token).await.unwrap().json();
    for member in ["id", "sale_id", "status", "price_cents", "created_at"] {
        assert_eq!(seen[member], bought.json()[member], "the response and the row have the same {member}");
    }

    let cancelled = client.post(&cancel, &alice.token, &Value::Null).await.unwrap();
    assert_eq!((cancelled.status.as_u16(), cancelled.text("status").as_str()), (200, "cancelled"));
    let again = client.post(&cancel, &alice.token, &Value::Null).await.unwrap();
    assert_eq!(
        (again.status, again.json()),
        (cancelled.status, cancelled.json()),
        "a repeated request gets the same response"
    );
    assert_eq!(state(&mut client, &sale.to_string()).await, ("on".into(), 1), "the stock is returned once");
    let bought = client.post(&orders, &bob.token, &Value::Null).await.unwrap();
    assert_eq!(bought.status, 201, "it can be bought again");
    assert_eq!(client.post(&orders, &alice.token, &Value::Null).await.unwrap().text("code"), "sold_out");

    let mine = client.get("/v1/orders", &alice.token).await.unwrap().json();
    assert_eq!(mine["orders"].as_array().unwrap().len(), 1);
    assert_eq!(mine["orders"][0]["status"], "cancelled");
    let stores = ledger(&storage).await;
    until("no release is pending", async || stores.ledger.pending_releases(None, 10).await.unwrap().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_pauses_resumes_and_tops_up() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let sale = shop.create_sale(1).await;
    let buyers = shop.log_in(0, 4).await;
    let mut client = shop.client().await;
    let orders = format!("/v1/sales/{sale}/orders");
    let mut buy = async |n: usize| {
        let reply = client.post(&orders, &buyers[n].token, &Value::Null).await.unwrap();
        if reply.status == 201 { "bought".to_owned() } else { reply.text("code") }
    };
    assert_eq!(shop.admin(&format!("sales/{sale}/pause"), &Value::Null).await.text("status"), "paused");
    assert_eq!(buy(0).await, "paused");
    assert_eq!(shop.admin(&format!("sales/{sale}/resume"), &Value::Null).await.text("state"), "on");
    assert_eq!(buy(0).await, "bought");
    assert_eq!(buy(1).await, "sold_out");
    let top_up = json!({ "add": 1, "request_id": "r1" });
    for _ in 0..3 {
        let topped = shop.admin(&format!("sales/{sale}/top-ups"), &top_up).await.json();
        assert_eq!(topped["total"], 2, "a repeated request adds the stock once");
    }
    let reused = shop.admin(&format!("sales/{sale}/top-ups"), &json!({ "add": 2, "request_id": "r1" })).await;
    assert_eq!(reused.text("code"), "request_id_reused");
    assert_eq!(buy(1).await, "bought");
    assert_eq!(buy(2).await, "sold_out");
    assert_eq!(shop.admin(&format!("sales/{sale}/end"), &Value::Null).await.text("state"), "ended");
    assert_eq!(buy(2).await, "ended");
    assert_eq!(shop.admin(&format!("sales/{sale}/resume"), &Value::Null).await.text("code"), "illegal_step");

    // Edits survive a restart.
    assert!(shop.stop().success());
    let shop = Shop::open(&storage);
    let seen = shop.client().await.get(&format!("/admin/v1/sales/{sale}"), TOKEN).await.unwrap().json();
    assert_eq!((&seen["status"], &seen["total"], &seen["remaining"]), (&json!("ended"), &json!(2), &json!(0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draft_is_invisible_and_voucher_has_one_sale() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let made = shop.admin("shops", &json!({ "type_id": "1", "name": "S" })).await.text("id");
    let voucher = json!({ "shop_id": made, "kind": "flash_sale", "title": "T", "price_cents": 1, "worth_cents": 2 });
    let voucher = shop.admin("vouchers", &voucher).await.text("id");
    let sale = json!({
        "voucher_id": voucher, "stock": 1, "begin": "2026-01-01T00:00:00+08:00", "end": "2099-01-01T00:00:00Z", "status": "draft",
    });
    let made = shop.admin("sales", &sale).await;
    assert_eq!((made.status.as_u16(), made.text("status").as_str()), (201, "draft"));
    assert_eq!(made.text("begin"), "2025-12-31T16:00:00.000Z");
    assert_eq!(shop.admin("sales", &sale).await.text("code"), "sale_exists");
    let id = made.text("id");
    let mut client = shop.client().await;
    let buyer = log_in(&mut client, "13800138000").await;
    assert_eq!(client.get(&format!("/v1/sales/{id}"), "").await.unwrap().text("code"), "no_such_sale");
    let tried = client.post(&format!("/v1/sales/{id}/orders"), &buyer.token, &Value::Null).await.unwrap();
    assert_eq!(tried.text("code"), "no_such_sale");
    assert_eq!(shop.admin(&format!("sales/{id}/resume"), &Value::Null).await.text("state"), "on");
    assert_eq!(state(&mut client, &id).await, ("on".into(), 1));

    // One response lists every error with its member.
    let bad = json!({ "voucher_id": voucher, "stock": 0, "begin": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z", "status": "paused" });
    let faults = shop.admin("sales", &bad).await.json();
    let members: Vec<_> = faults["errors"].as_array().unwrap().iter().map(|fault| &fault["member"]).collect();
    assert_eq!(members, ["stock", "end", "status"]);
}

/// A webhook that refuses twice before it accepts a code; returns the received signatures and bodies.
async fn receiver() -> (std::net::SocketAddr, tokio::sync::mpsc::Receiver<(String, String)>) {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (tell, received) = tokio::sync::mpsc::channel(10);
    tokio::spawn(async move {
        for n in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let tell = tell.clone();
            let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                let tell = tell.clone();
                async move {
                    let signature = request.headers()["x-stampede-signature"].to_str().unwrap().to_owned();
                    let body = http_body_util::BodyExt::collect(request.into_body()).await.unwrap().to_bytes();
                    tell.send((signature, String::from_utf8(body.to_vec()).unwrap())).await.unwrap();
                    let status = if n < 2 { 500 } else { 204 };
                    let answer = hyper::Response::builder().status(status);
                    answer.body(http_body_util::Empty::<bytes::Bytes>::new())
                }
            });
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, service));
        }
    });
    (address, received)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn webhook_gets_signed_codes_with_retries() {
    use hmac::{Hmac, KeyInit as _, Mac as _};
    const SECRET: &str = "a-secret-of-the-operator";
    let (address, mut received) = receiver().await;
    let storage = temporary_storage();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(storage.path());
    command.env("STAMPEDE_WEBHOOK_SECRET", SECRET).env("STAMPEDE__LOGIN__SENDER", "webhook");
    command.env("STAMPEDE__LOGIN__WEBHOOK_URL", format!("http://{address}/codes")).env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let sent = client.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    let challenge = sent.text("challenge");
    let expected = json!({ "challenge": challenge, "expires_in_s": 300 });
    assert_eq!(sent.json(), expected, "the code is not in the response");

    let mut bodies = Vec::new();
    for _ in 0..3 {
        let (signature, body) = received.recv().await.unwrap();
        let (time, hex) = signature.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
        let mut mac = Hmac::<sha2::Sha256>::new_from_slice(SECRET.as_bytes()).unwrap();
        mac.update(format!("{time}.{body}").as_bytes());
        let expected: String = mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, expected);
        bodies.push(body);
    }
    assert!(bodies.iter().all(|body| *body == bodies[0]), "the same code each time");
    let code: Value = serde_json::from_str(&bodies[0]).unwrap();
    let login = json!({ "phone": "13800138000", "code": code["code"], "challenge": challenge });
    assert_eq!(client.post("/v1/login", "", &login).await.unwrap().status, 200);
    assert!(shop.stop().success());
    assert!(received.try_recv().is_err(), "an accepted code is not sent again");
}
