//! Sessions: refresh, end, expiry, keys, and what administrators can do.

use std::time::Instant;

use hyper::Method;
use serde_json::{Value, json};
use sqlx::{Connection as _, SqliteConnection};
use stampede_core::Timestamp;
use stampede_testkit::{Client, until};

use crate::shop::{Buyer, Shop, Storage, TOKEN, command, default_demo_command, ledger, log_in, temporary_storage};

async fn status(client: &mut Client, method: Method, path: &str, token: &str) -> u16 {
    client.call(method, path, token, &Value::Null).await.unwrap().status.as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_listed_and_revoked() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let (phone, laptop) = (log_in(&mut client, "13800138000").await, log_in(&mut client, "13800138000").await);
    let stranger = log_in(&mut client, "13800138001").await;
    let listed = client.get("/v1/sessions", &laptop.token).await.unwrap().json();
    let sessions = listed["sessions"].as_array().unwrap();
    assert_eq!(sessions.len(), 2);
    let of = |current: bool| sessions.iter().find(|one| one["current"] == current).unwrap()["id"].as_str().unwrap();
    assert!(!phone.token.contains(of(false)));

    let path = format!("/v1/sessions/{}", of(false));
    let mut end = async |token: &str| client.call(Method::DELETE, &path, token, &Value::Null).await.unwrap();
    assert_eq!(end(&stranger.token).await.text("code"), "no_such_session", "another's session");
    assert_eq!(end(&laptop.token).await.status, 204);
    assert_eq!(end(&laptop.token).await.text("code"), "no_such_session");
    assert_eq!(client.get("/v1/me", &phone.token).await.unwrap().text("code"), "unauthorized", "revoked at once");
    assert_eq!(client.get("/v1/me", &laptop.token).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_can_end_all_their_sessions() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let (phone, laptop) = (log_in(&mut client, "13800138000").await, log_in(&mut client, "13800138000").await);
    let stranger = log_in(&mut client, "13800138001").await;
    assert_eq!(status(&mut client, Method::DELETE, "/v1/sessions", &laptop.token).await, 204);
    for (token, expected) in [(&phone.token, 401), (&laptop.token, 401), (&stranger.token, 200)] {
        assert_eq!(status(&mut client, Method::GET, "/v1/me", token).await, expected);
    }
    assert_eq!(status(&mut client, Method::DELETE, "/v1/sessions", &laptop.token).await, 401);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn administrators_end_sessions_and_disable_accounts() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__LOGIN__CODES_PER_PHONE__COUNT", "1000000");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let buyer = log_in(&mut client, "13800138000").await;
    let found = client.get("/admin/v1/users?phone=13800138000", TOKEN).await.unwrap();
    assert_eq!((found.text("id"), found.text("phone")), (buyer.id.to_string(), "138****8000".to_owned()));
    assert_eq!(status(&mut client, Method::GET, "/admin/v1/users?phone=13800138000", &buyer.token).await, 401);

    let user = format!("/admin/v1/users/{}", buyer.id);
    assert_eq!(status(&mut client, Method::DELETE, &format!("{user}/sessions"), TOKEN).await, 204);
    assert_eq!(status(&mut client, Method::GET, "/v1/me", &buyer.token).await, 401, "ended at once");

    let buyer = log_in(&mut client, "13800138000").await;
    let disabled = client.post(&format!("{user}/disable"), TOKEN, &Value::Null).await.unwrap();
    assert_eq!(disabled.json()["disabled"], true);
    assert_eq!(status(&mut client, Method::GET, "/v1/me", &buyer.token).await, 401);
    let sent = client.post("/v1/login/codes", "", &json!({ "phone": "13800138000" })).await.unwrap();
    let login = json!({ "phone": "13800138000", "code": sent.text("demo_code"), "challenge": sent.text("challenge") });
    let refused = client.post("/v1/login", "", &login).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.text("code").as_str()), (403, "account_disabled"));
    assert_eq!(client.get(&user, TOKEN).await.unwrap().json()["disabled"], true);

    let enabled = client.post(&format!("{user}/enable"), TOKEN, &Value::Null).await.unwrap();
    assert_eq!(enabled.json()["disabled"], false);
    assert_eq!(status(&mut client, Method::GET, "/v1/me", &buyer.token).await, 401, "a new login is needed");
    assert_eq!(log_in(&mut client, "13800138000").await.id, buyer.id);
    let nobody = client.post("/admin/v1/users/1/disable", TOKEN, &Value::Null).await.unwrap();
    assert_eq!(nobody.text("code"), "no_such_user");

    let target = format!("user%20{}", buyer.id);
    let log = client.get(&format!("/admin/v1/audit?target={target}"), TOKEN).await.unwrap().json();
    let line = |action: &Value| (action["action"].clone(), action["outcome"].clone(), action["changes"].clone());
    let lines: Vec<_> = log["actions"].as_array().unwrap().iter().rev().map(line).collect();
    let change = |field: &str, from: Value, to: Value| json!([{ "field": field, "from": from, "to": to }]);
    let expected = [
        ("end_sessions", change("sessions", json!(1), json!(0))),
        ("disable_user", change("disabled", json!(false), json!(true))),
        ("enable_user", change("disabled", json!(true), json!(false))),
    ];
    assert_eq!(lines, expected.map(|(action, changes)| (json!(action), json!("done"), changes)));
}

/// The expiry of the user's only session in the ledger.
async fn expiry(stores: &stampede_core::ports::Stores, buyer: &Buyer) -> Timestamp {
    stores.accounts.sessions_of(buyer.id, Timestamp::from_ms(0)).await.unwrap()[0].expires_at
}

/// Reads the sales with this token until the session's expiry has moved.
async fn browse(shop: &Shop, stores: &stampede_core::ports::Stores, buyer: &Buyer) {
    let (first, mut client) = (expiry(stores, buyer).await, shop.client().await);
    until("the session is refreshed", async || {
        assert_eq!(client.get("/v1/sales", &buyer.token).await.unwrap().status, 200);
        expiry(stores, buyer).await > first
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn public_pages_refresh_the_session() {
    let storage = temporary_storage();
    let start = || {
        let mut command = command(&storage);
        command.env("STAMPEDE__LOGIN__SESSION_TTL_MS", "60000");
        Shop::run(command)
    };
    let shop = start();
    let mut client = shop.client().await;
    let buyer = log_in(&mut client, "13800138000").await;
    let stores = ledger(&storage).await;
    browse(&shop, &stores, &buyer).await;
    // The page is served without a token and with an invalid one, too.
    for token in ["junk", "A".repeat(54).as_str()] {
        assert_eq!(client.get("/v1/sales", token).await.unwrap().status, 200);
    }
    // After a restart the session is not in memory; it is read in the background while the page is served.
    assert!(shop.stop().success());
    let shop = start();
    browse(&shop, &stores, &buyer).await;
    assert_eq!(status(&mut shop.client().await, Method::GET, "/v1/me", &buyer.token).await, 200);
}

/// Expires all sessions in the database of a stopped server.
async fn expire_all(storage: &Storage, sessions: u64) {
    let path = storage.path().join("stampede.db");
    let mut database = SqliteConnection::connect(path.to_str().unwrap()).await.unwrap();
    let expired = sqlx::query("UPDATE session SET expires_at = 1").execute(&mut database).await.unwrap();
    assert_eq!(expired.rows_affected(), sessions);
    database.close().await.unwrap();
}

/// With default settings: six hundred requests with a valid token whose session has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_tokens_are_cached_and_rarely_read_the_ledger() {
    const LANES: u32 = 8;
    let storage = temporary_storage();
    let shop = Shop::run(default_demo_command(&storage));
    let sale = shop.create_sale(1).await;
    let buyer = log_in(&mut shop.client().await, "13800138000").await;
    assert!(shop.stop().success());
    expire_all(&storage, 1).await;

    let shop = Shop::run(default_demo_command(&storage));
    let buy = format!("/v1/sales/{sale}/orders");
    let lanes: Vec<_> = (0..LANES)
        .map(|_| {
            let (address, token, buy) = (shop.address, buyer.token.clone(), buy.clone());
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                for n in 0..600 / LANES {
                    let (method, path) = match n % 5 {
                        0 => (Method::POST, buy.as_str()),
                        1 => (Method::GET, "/v1/sales"),
                        _ => (Method::GET, "/v1/orders"),
                    };
                    match (path, status(&mut client, method, path, &token).await) {
                        ("/v1/sales", 200) | (_, 401) => {}
                        (path, status) => panic!("{path}: {status}"),
                    }
                }
            })
        })
        .collect();
    for lane in lanes {
        lane.await.unwrap();
    }
    let asked = shop.metric("stampede_session_lookups_total").await;
    eprintln!("600 requests with an expired token: the ledger was asked {asked} times");
    // Each task may read the ledger once before the result is cached, and once more if the test takes longer than the cache entry lives.
    assert!((1.0..=4.0 * f64::from(LANES)).contains(&asked), "{asked}");
}

/// With default settings: three hundred expired tokens of one user, each used once, so that caching does not help.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_tokens_of_one_user_are_limited_before_the_ledger() {
    const SESSIONS: usize = 300;
    let storage = temporary_storage();
    let start = || {
        let mut command = default_demo_command(&storage);
        command.env("STAMPEDE__ALLOW_LOAD_TEST", "true");
        Shop::run(command)
    };
    let shop = start();
    let mut tokens = Vec::new();
    for _ in 0..SESSIONS {
        let opened = shop.admin("load-test/sessions", &json!({ "first": 7, "count": 1 })).await.json();
        tokens.push(opened["sessions"][0]["token"].as_str().unwrap().to_owned());
    }
    assert!(shop.stop().success());
    expire_all(&storage, SESSIONS as u64).await;

    let shop = start();
    let (mut client, started) = (shop.client().await, Instant::now());
    let mut counts = [0, 0];
    for token in &tokens {
        match status(&mut client, Method::GET, "/v1/me", token).await {
            401 => counts[0] += 1,
            429 => counts[1] += 1,
            status => panic!("{status}"),
        }
    }
    // A hundred in ten seconds, twice that across two windows, and more on a slow machine.
    let windows = started.elapsed().as_secs() / 10 + 1;
    let asked = shop.metric("stampede_session_lookups_total").await;
    eprintln!(
        "{SESSIONS} expired tokens of one user: {counts:?} responses of 401 and 429, {asked} reads of the ledger"
    );
    assert!(asked <= 100.0 * (windows + 1) as f64, "the ledger was asked {asked} times");
    assert_eq!(f64::from(counts[0]), asked, "only these were read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_keys_are_rotated_without_ending_sessions() {
    let storage = temporary_storage();
    let old = "5d0c81f7e92a46b3a1de7788f04c9b2563d2f01b9ce8574a0f6a2d91c37be4ff";
    let new = "c1a5e8027b9d4f36880d1e52f7a3b96c40e7d2158bfa63c994e01d7a25b8f3cd";
    let file = storage.path().join("session-key");
    let with_file = |text: String| {
        std::fs::write(&file, text).unwrap();
        let mut command = command(&storage);
        command.env("STAMPEDE__LOGIN__SESSION_KEY_FILE", &file);
        Shop::run(command)
    };
    let me =
        async |shop: &Shop, buyer: &Buyer| status(&mut shop.client().await, Method::GET, "/v1/me", &buyer.token).await;

    let shop = with_file(format!("{old}\n"));
    let before = log_in(&mut shop.client().await, "13800138000").await;
    assert!(shop.stop().success());
    let shop = with_file(format!("{new}\n{old}\n"));
    let after = log_in(&mut shop.client().await, "13800138001").await;
    assert_eq!([me(&shop, &before).await, me(&shop, &after).await], [200, 200], "both keys are valid");
    assert!(shop.stop().success());
    let shop = with_file(format!("{new}\n"));
    assert_eq!([me(&shop, &before).await, me(&shop, &after).await], [401, 200], "the old key is gone");
    assert!(shop.stop().success());

    let mut from_environment = command(&storage);
    from_environment.env("STAMPEDE_SESSION_KEY", format!("{old},{new}"));
    let shop = Shop::run(from_environment);
    assert_eq!([me(&shop, &before).await, me(&shop, &after).await], [200, 200]);
    assert!(shop.stop().success());

    let mut weak = command(&storage);
    let refused = weak.env("STAMPEDE_SESSION_KEY", "secret").output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("64 hexadecimal digits"), "{error}");
}
