//! Administrators, their roles and the audit log.

use std::collections::HashMap;
use std::path::Path;

use hyper::{Method, Request};
use serde_json::{Value, json};

use stampede_testkit::{Client, count};

use crate::shop::{Kind, Shop, Storage, TOKEN, command, log_in, temporary_storage};

const VIEWER: &str = "the-token-of-a-viewer-3b9e07c4a1d2";
const SECOND: &str = "the-token-of-a-second-operator-68f1";

/// A settings file with two additional administrators.
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
async fn viewer_cannot_change_anything_and_changes_are_audited() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.arg("--config").arg(settings(storage.path()));
    let shop = Shop::run(command);
    let sale = shop.create_sale(3).await;
    let mut client = shop.client().await;

    for path in ["/admin/v1/sales", "/admin/v1/audit", "/metrics", &format!("/admin/v1/sales/{sale}")] {
        assert_eq!(client.get(path, VIEWER).await.unwrap().status, 200, "{path}");
    }
    let top_up = json!({ "add": 1, "request_id": "r" });
    let reduce = json!({ "remove": 1, "request_id": "r" });
    let window = json!({ "end": "2100-01-01T00:00:00Z", "request_id": "r" });
    let shop_body = json!({ "type_id": "1", "name": "S" });
    let changes = [
        ("shops".to_owned(), &shop_body),
        (format!("sales/{sale}/pause"), &Value::Null),
        (format!("sales/{sale}/resume"), &Value::Null),
        (format!("sales/{sale}/end"), &Value::Null),
        (format!("sales/{sale}/top-ups"), &top_up),
        (format!("sales/{sale}/reduce"), &reduce),
        (format!("sales/{sale}/window"), &window),
    ];
    for (path, body) in &changes {
        let reply = client.post(&format!("/admin/v1/{path}"), VIEWER, body).await.unwrap();
        assert_eq!((reply.status.as_u16(), reply.text("code").as_str()), (403, "forbidden"), "{path}");
    }
    let seen = client.get(&format!("/admin/v1/sales/{sale}"), VIEWER).await.unwrap().json();
    assert_eq!((&seen["status"], &seen["total"]), (&json!("on_sale"), &json!(3)));

    for (path, body) in &changes[1..] {
        client.post(&format!("/admin/v1/{path}"), SECOND, body).await.unwrap();
    }
    let log = client.get("/admin/v1/audit?limit=6", VIEWER).await.unwrap().json();
    let line = |action: &Value| {
        let text = |member: &str| action[member].as_str().unwrap().to_owned();
        format!("{} {} {}: {}", text("actor"), text("action"), text("target"), text("outcome"))
    };
    let lines: Vec<String> = log["actions"].as_array().unwrap().iter().map(line).collect();
    assert_eq!(
        lines,
        [
            format!("omar edit_window sale {sale}: illegal_step"),
            format!("omar reduce sale {sale}: illegal_step"),
            format!("omar top_up sale {sale}: illegal_step"),
            format!("omar end sale {sale}: done"),
            format!("omar resume sale {sale}: done"),
            format!("omar pause sale {sale}: done"),
        ]
    );
    let next = log["next"].as_str().unwrap();
    let before = client.get(&format!("/admin/v1/audit?before={next}&limit=1"), TOKEN).await.unwrap().json();
    let created = &before["actions"][0];
    assert_eq!((&created["action"], &created["made"]), (&json!("create_sale"), &json!(format!("sale {sale}"))));
    assert!(!log.to_string().contains(SECOND) && !log.to_string().contains(VIEWER));
    assert!(shop.stop().success());
}

/// The audit log shows who changed what, when, and from where.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_log_has_actor_old_and_new_values() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.arg("--config").arg(settings(storage.path())).env("STAMPEDE__ALLOW_LOAD_TEST", "true");
    let shop = Shop::run(command);
    let sale = shop.create_sale(3).await;
    let mut client = shop.client().await;
    let voucher = client.get(&format!("/admin/v1/sales/{sale}"), TOKEN).await.unwrap().text("voucher_id");
    let audit = async |query: &str| {
        let log = shop.client().await.get(&format!("/admin/v1/audit?{query}"), VIEWER).await.unwrap();
        assert_eq!(log.status, 200, "{log:?}");
        log.json()["actions"].as_array().unwrap().clone()
    };
    let of_sale = format!("target=sale%20{sale}");

    // The creation of the sale is found by the id of the sale.
    let made = audit(&of_sale).await.remove(0);
    assert_eq!(made["target"], format!("voucher {voucher}"));
    assert_eq!((&made["outcome"], &made["made"]), (&json!("done"), &json!(format!("sale {sale}"))));
    assert_eq!(made["request"]["stock"], 3);
    assert!(made["changes"].as_array().unwrap().contains(&json!({ "field": "total", "from": null, "to": 3 })));

    // An edit of a voucher: only the changed fields with old and new values; the actor, the address and the request id.
    let old = client.get(&format!("/admin/v1/sales/{sale}"), TOKEN).await.unwrap().json();
    let shop_id =
        audit(&format!("target=voucher%20{voucher}")).await.pop().unwrap()["target"].as_str().unwrap()[5..].to_owned();
    let body = json!({
        "shop_id": shop_id, "kind": "flash_sale", "title": "Noodles", "price_cents": 150, "worth_cents": old["worth_cents"],
    });
    let request =
        Request::builder().method(Method::PUT).uri(format!("/admin/v1/vouchers/{voucher}")).header("host", "x");
    let request = request.header("content-type", "application/json").header("x-forwarded-for", "203.0.113.9");
    let request = request.header("authorization", format!("Bearer {SECOND}")).body(body.to_string().into()).unwrap();
    let edited = client.send(request).await.unwrap();
    assert_eq!(edited.status, 200, "{edited:?}");
    let record = audit(&format!("target=voucher%20{voucher}&limit=1")).await.remove(0);
    assert_eq!((&record["actor"], &record["address"]), (&json!("omar"), &json!("203.0.113.9")));
    assert_eq!(record["request_id"], edited.header("x-request-id"));
    assert_eq!(
        record["changes"],
        json!([
            { "field": "title", "from": "Test", "to": "Noodles" },
            { "field": "price_cents", "from": 100, "to": 150 },
        ])
    );
    assert!(record["asked_at"].as_str().unwrap() <= record["finished_at"].as_str().unwrap());

    let pause = format!("sales/{sale}/pause");
    let top_up = (format!("sales/{sale}/top-ups"), json!({ "add": 4, "request_id": "r" }));
    let too_much = (top_up.0.clone(), json!({ "add": 10_000_000, "request_id": "s" }));
    let steps = [(&pause, &Value::Null), (&pause, &Value::Null), (&top_up.0, &top_up.1), (&top_up.0, &top_up.1)];
    for (path, body) in steps.into_iter().chain([(&too_much.0, &too_much.1)]) {
        shop.admin(path, body).await;
    }
    let log = audit(&format!("{of_sale}&limit=5")).await;
    let recorded: Vec<_> = log.iter().rev().map(|one| (&one["outcome"], one["changes"].clone())).collect();
    let status = json!([{ "field": "status", "from": "on_sale", "to": "paused" }]);
    let total = json!([{ "field": "total", "from": 3, "to": 7 }]);
    let [done, unchanged, refused] = [json!("done"), json!("unchanged"), json!("illegal_step")];
    let none = json!([]);
    assert_eq!(
        recorded,
        [(&done, status), (&unchanged, none.clone()), (&done, total), (&unchanged, none.clone()), (&refused, none)]
    );
    assert_eq!(log[2]["request"], top_up.1);
    assert!(log[0]["error"].as_str().unwrap().contains("at most 10000000"), "{}", log[0]);

    // An invalid request is recorded with the reason of its refusal.
    let bad = json!({ "type_id": "1", "name": "", "address": "x" });
    shop.admin("shops", &bad).await;
    let record = audit("limit=1").await.remove(0);
    assert_eq!((&record["outcome"], &record["request"]["name"]), (&json!("invalid_request"), &json!("")));
    assert!(record["error"].as_str().unwrap().contains("name"), "{record}");

    // Test sessions are recorded as well.
    assert_eq!(shop.admin("load-test/sessions", &json!({ "first": 5, "count": 7 })).await.status, 200);
    let record = audit("limit=1").await.remove(0);
    assert_eq!(
        (&record["action"], &record["request"]),
        (&json!("open_test_sessions"), &json!({ "first": 5, "count": 7 }))
    );
    assert_eq!(record["changes"], json!([{ "field": "sessions", "from": null, "to": 7 }]));
    assert!(shop.stop().success());
}

/// Administrators edit the same voucher concurrently: each record has the value that it replaced.
async fn audit_log_has_the_replaced_value_of_concurrent_edits(kind: Kind) {
    let storage = Storage::on(kind);
    let shop = Shop::open(&storage);
    let shop_id = shop.admin("shops", &json!({ "type_id": "1", "name": "S" })).await.text("id");
    let body = |title: &str| json!({ "shop_id": shop_id, "kind": "ordinary", "title": title, "price_cents": 1, "worth_cents": 2 });
    let voucher = shop.admin("vouchers", &body("first")).await.text("id");
    let (lanes, rounds) = (4, count(100, 10));
    let editing: Vec<_> = (0..lanes)
        .map(|lane| {
            let (address, path) = (shop.address, format!("/admin/v1/vouchers/{voucher}"));
            let bodies: Vec<Value> = (0..rounds).map(|round| body(&format!("{lane}-{round}"))).collect();
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                for body in bodies {
                    assert_eq!(client.call(Method::PUT, &path, TOKEN, &body).await.unwrap().status, 200);
                }
            })
        })
        .collect();
    for lane in editing {
        lane.await.unwrap();
    }
    let (mut client, mut before, mut replaced) = (shop.client().await, String::new(), HashMap::new());
    loop {
        let path = format!("/admin/v1/audit?target=voucher%20{voucher}&limit=100{before}");
        let page = client.get(&path, TOKEN).await.unwrap().json();
        for action in page["actions"].as_array().unwrap().iter().filter(|action| action["action"] == "edit_voucher") {
            let change = &action["changes"][0];
            assert_eq!(change["field"], "title");
            let [from, to] = ["from", "to"].map(|end| change[end].as_str().unwrap().to_owned());
            assert_eq!(replaced.insert(from, to), None, "a title was replaced twice");
        }
        let Some(next) = page["next"].as_str() else { break };
        before = format!("&before={next}");
    }
    // The records form a chain from the first title to the last one.
    let (mut title, mut steps) = ("first", 0);
    while let Some(next) = replaced.get(title) {
        (title, steps) = (next, steps + 1);
    }
    let now = client.get(&format!("/admin/v1/shops/{shop_id}/vouchers"), TOKEN).await.unwrap().json();
    assert_eq!((title, steps), (now["vouchers"][0]["title"].as_str().unwrap(), lanes * rounds));
}

on_each_database!(audit_log_has_the_replaced_value_of_concurrent_edits);

/// Behind a trusted proxy, the limits count the client's address and not the proxy's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_count_the_client_behind_a_trusted_proxy() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.arg("--config").arg(settings(storage.path())).env("STAMPEDE__LOGIN__PER_ADDRESS__COUNT", "2");
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
    assert_eq!(ask(5, "2.2.2.2, 1.1.1.1").await, 429, "addresses that the client sends are not trusted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_have_request_ids_and_are_counted() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    log_in(&mut client, "13800138000").await;
    let (one, two) = (client.get("/healthz", "").await.unwrap(), client.get("/nowhere", "").await.unwrap());
    assert_eq!(one.header("x-request-id").len(), 16);
    assert_ne!(one.header("x-request-id"), two.header("x-request-id"));
    assert!(shop.metric("stampede_http_requests_total{status=\"404\"}").await >= 1.0);
    for (route, times) in [("/v1/login", 1.0), ("/v1/login/codes", 1.0), ("/healthz", 1.0)] {
        assert_eq!(shop.metric(&format!("stampede_http_seconds_count{{route=\"{route}\"}}")).await, times, "{route}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shops_and_vouchers_are_listed_searched_edited_and_shelved() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let types = client.get("/v1/shop-types", "").await.unwrap().json();
    let type_id = types["shop_types"][0]["id"].as_str().unwrap().to_owned();
    let mut ids = Vec::new();
    for name in ["Blue Door", "Blue Moon", "Red Moon"] {
        ids.push(shop.admin("shops", &json!({ "type_id": type_id, "name": name, "address": "x" })).await.text("id"));
    }
    let mut names = async |query: &str| {
        let found = client.get(&format!("/v1/shops?{query}"), "").await.unwrap().json();
        let names = found["shops"].as_array().unwrap().iter().map(|shop| shop["name"].as_str().unwrap().to_owned());
        (names.collect::<Vec<_>>(), found["next"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(names("name=blue").await.0, ["Blue Moon", "Blue Door"]);
    let (first, next) = names("name=moon&limit=1").await;
    assert_eq!((first, &next), (vec!["Red Moon".to_owned()], &ids[2]));
    assert_eq!(names(&format!("name=moon&limit=1&before={next}")).await.0, ["Blue Moon"]);
    assert_eq!(names("name=%25").await.0, Vec::<String>::new());

    let edit = json!({ "type_id": type_id, "name": "Green Door", "address": "y" });
    let edited = client.call(Method::PUT, &format!("/admin/v1/shops/{}", ids[0]), TOKEN, &edit).await.unwrap();
    assert_eq!((edited.status.as_u16(), edited.text("name").as_str()), (200, "Green Door"));
    assert_eq!(client.get(&format!("/v1/shops/{}", ids[0]), "").await.unwrap().text("address"), "y");

    let mut voucher =
        json!({ "shop_id": ids[0], "kind": "ordinary", "title": "T", "price_cents": 1, "worth_cents": 2 });
    let made = shop.admin("vouchers", &voucher).await.text("id");
    let path = format!("/v1/shops/{}/vouchers", ids[0]);
    assert_eq!(client.get(&path, "").await.unwrap().json()["vouchers"][0]["title"], "T");
    voucher["title"] = json!("Tea");
    let put = client.call(Method::PUT, &format!("/admin/v1/vouchers/{made}"), TOKEN, &voucher).await.unwrap();
    assert_eq!(put.text("title"), "Tea");
    voucher["kind"] = json!("flash_sale");
    let put = client.call(Method::PUT, &format!("/admin/v1/vouchers/{made}"), TOKEN, &voucher).await.unwrap();
    assert_eq!(put.text("code"), "illegal_step", "the kind cannot be changed");

    shop.admin(&format!("vouchers/{made}/unshelve"), &Value::Null).await;
    assert_eq!(client.get(&path, "").await.unwrap().json()["vouchers"], json!([]));
    let all = client.get(&format!("/admin{path}"), TOKEN).await.unwrap().json();
    assert_eq!(all["vouchers"][0]["on_shelf"], false);
    shop.admin(&format!("vouchers/{made}/shelve"), &Value::Null).await;
    assert_eq!(client.get(&path, "").await.unwrap().json()["vouchers"][0]["title"], "Tea");
    let bad = json!({ "shop_id": ids[0], "kind": "ordinary", "title": "", "price_cents": -1, "worth_cents": 2 });
    let faults = shop.admin("vouchers", &bad).await.json();
    let members: Vec<_> = faults["errors"].as_array().unwrap().iter().map(|fault| &fault["member"]).collect();
    assert_eq!(members, ["title", "price_cents"]);
}

/// Reads are served from the cache; a change is visible to the next read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_reads_of_a_shop_load_it_once() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let mut new = json!({ "type_id": "1", "name": "A", "address": "x" });
    let id = shop.admin("shops", &new).await.text("id");
    let of_shops =
        async |what: &str| shop.metric(&format!("stampede_cache_total{{cache=\"shops\",what=\"{what}\"}}")).await;
    let paths = [format!("/v1/shops/{id}"), format!("/v1/shops/{id}/vouchers")];
    for round in 0..3 {
        let loads = of_shops("loads").await;
        let hits = of_shops("local_hits").await;
        for _ in 0..20 {
            for path in &paths {
                assert_eq!(client.get(path, "").await.unwrap().status, 200);
            }
            assert_eq!(client.get(&paths[0], "").await.unwrap().text("name"), new["name"].as_str().unwrap());
        }
        assert_eq!(of_shops("loads").await, loads + 1.0, "round {round}");
        assert!(of_shops("local_hits").await >= hits + 59.0);
        new["name"] = json!(format!("A{round}"));
        let edited = client.call(Method::PUT, &format!("/admin/v1/shops/{id}"), TOKEN, &new).await.unwrap();
        assert_eq!(edited.status, 200);
    }
    // A missing shop is cached as well.
    let empty_hits = of_shops("empty_hits").await;
    for _ in 0..10 {
        assert_eq!(client.get("/v1/shops/12345", "").await.unwrap().text("code"), "no_such_shop");
    }
    assert_eq!(of_shops("empty_hits").await, empty_hits + 9.0);
}
