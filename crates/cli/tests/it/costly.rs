//! One address sends the most expensive requests as fast as it can, while honest requests come from another.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlx::{Connection as _, Executor as _, SqliteConnection};
use stampede_testkit::proxy::Fault;
use stampede_testkit::{Client, Proxy, count};
use tokio::task::{JoinHandle, JoinSet};

use crate::attack::honest;
use crate::shop::{Kind, Shop, Storage, command, default_settings, temporary_storage};

/// 127.0.0.2 tries to buy without a token; returns the number of 401 and of 429 responses.
async fn buys(shop: &Shop, client: &mut Client, path: &str, tries: usize) -> (usize, usize) {
    let (mut unauthorized, mut limited) = (0, 0);
    for _ in 0..tries {
        let reply = client.post(path, "", &serde_json::Value::Null).await.unwrap();
        match reply.status.as_u16() {
            401 => unauthorized += 1,
            429 => limited += 1,
            other => panic!("{other} at {}", shop.address),
        }
    }
    (unauthorized, limited)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buying_has_a_limit_per_address() {
    let storage = temporary_storage();
    let mut command = default_settings(&storage);
    command.env("STAMPEDE__BUY__PER_ADDRESS__COUNT", "10").env("STAMPEDE__BUY__PER_ADDRESS__WINDOW_MS", "600000");
    let shop = Shop::run(command);
    let mut one = honest(shop.address).await;
    // On the fast path and through the router alike.
    assert_eq!(buys(&shop, &mut one, "/v1/sales/7/orders", 6).await, (6, 0));
    assert_eq!(buys(&shop, &mut one, "/v1/sales/%37/orders", 6).await, (4, 2));
    assert_eq!(buys(&shop, &mut one, "/v1/sales/7/orders", 3).await, (0, 3));
    let mut other = Client::connect(shop.address).await.unwrap();
    assert_eq!(buys(&shop, &mut other, "/v1/sales/7/orders", 3).await, (3, 0));
    assert_eq!(shop.metric("stampede_buy_answers_total{answer=\"too_many_requests\"}").await, 5.0);
}

/// A limiter with full memory does not limit new clients, and counts them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_beyond_limiter_memory_are_counted() {
    let storage = temporary_storage();
    let settings = storage.path().join("settings.toml");
    std::fs::write(&settings, "[limits]\nmemory = 1\n[http]\ntrusted_proxies = [\"127.0.0.1\"]\n").unwrap();
    let mut command = default_settings(&storage);
    command.arg("--config").arg(settings).env("STAMPEDE__LOGIN__SENDER", "console");
    let shop = Shop::run(command);
    let mut proxy = shop.client().await;
    for n in 0..100 {
        let request = hyper::Request::builder().uri("/v1/sales").header("host", "x");
        let request = request.header("x-forwarded-for", format!("10.0.0.{n}")).body(Default::default()).unwrap();
        assert_eq!(proxy.send(request).await.unwrap().status, 200);
    }
    let name = "stampede_limit_let_through_total{limit=\"reads_per_address\"}";
    assert!(shop.metric(name).await >= 60.0);
    assert_eq!(shop.metric("stampede_limit_let_through_total{limit=\"buy_per_user\"}").await, 0.0);
    // Each code is for another phone.
    for n in 0..40 {
        let body = serde_json::json!({ "phone": format!("138{n:08}") });
        assert_eq!(proxy.post("/v1/login/codes", "", &body).await.unwrap().status, 200);
    }
    let of_codes =
        async |limit: &str| shop.metric(&format!("stampede_limit_let_through_total{{limit=\"{limit}\"}}")).await;
    assert!(of_codes("codes_per_phone").await > 0.0);
    assert_eq!(of_codes("codes_per_shop").await, 0.0);
}

const SHOPS: u32 = 100_000;

/// Inserts many shops directly into the database.
async fn fill_shops(storage: &Storage) {
    let mut migrate = Command::new(env!("CARGO_BIN_EXE_stampede"));
    assert!(migrate.args(["migrate", "--data-dir"]).arg(storage.path()).output().unwrap().status.success());
    let url = format!("sqlite:{}", storage.path().join("stampede.db").display());
    let mut database = SqliteConnection::connect(&url).await.unwrap();
    for sql in [
        "PRAGMA synchronous = OFF".to_owned(),
        format!(
            "INSERT INTO shop (id, type_id, name, folded_name, address)
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {SHOPS})
             SELECT i, 1 + i % 5, 'Tea ' || i || '馆', 'tea ' || i || '馆', '' FROM n"
        ),
        "INSERT OR IGNORE INTO shop_gram (gram, shop_id)
         WITH RECURSIVE at(p) AS (SELECT 1 UNION ALL SELECT p + 1 FROM at WHERE p < 16), length(l) AS (VALUES (1), (2), (3))
         SELECT substr(folded_name, p, l), id FROM shop, at, length WHERE p + l <= length(folded_name) + 1 ORDER BY 1, 2"
            .to_owned(),
    ] {
        database.execute(sqlx::AssertSqlSafe(sql)).await.unwrap();
    }
    database.close().await.unwrap();
}

/// The 99th percentile of sequential honest reads.
async fn p99(client: &mut Client, requests: u32) -> Duration {
    let mut times = Vec::new();
    for n in 0..requests {
        let path = match n % 4 {
            0 => "/v1/sales".to_owned(),
            1 => format!("/v1/shops/{}", 1 + n * 97 % SHOPS),
            2 => format!("/v1/shops?type=2&before={}", 1 + n * 89 % SHOPS),
            _ => format!("/v1/shops/{}/vouchers", 1 + n * 83 % SHOPS),
        };
        let started = Instant::now();
        assert_eq!(client.get(&path, "").await.unwrap().status, 200, "{path}");
        times.push(started.elapsed());
    }
    times.sort();
    times[times.len() * 99 / 100]
}

/// Sends the most expensive searches as fast as possible: parts that every name has, without a match.
async fn search(address: SocketAddr, counts: Arc<[AtomicUsize; 2]>) {
    let mut client = Client::connect(address).await.unwrap();
    let queries = ["ea%201%E9%A6%86", "a%20", "tea%209%20", "%E9%A6%86", "1111%E9%A6%86", "ea%2099zz"];
    for n in 0.. {
        let path = format!("/v1/shops?limit=100&name={}", queries[n % queries.len()]);
        let reply = client.get(&path, "").await.unwrap();
        match reply.status.as_u16() {
            200 => counts[0].fetch_add(1, Ordering::Relaxed),
            429 => {
                tokio::time::sleep(Duration::from_millis(20)).await;
                counts[1].fetch_add(1, Ordering::Relaxed)
            }
            other => panic!("{other}: {reply:?}"),
        };
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searches_of_one_address_do_not_slow_down_honest_reads() {
    let storage = temporary_storage();
    fill_shops(&storage).await;
    let shop = Shop::run(default_settings(&storage));
    let mut client = honest(shop.address).await;
    let found = client.get("/v1/shops?name=a%204711%E9%A6%86", "").await.unwrap().json();
    assert_eq!(found["shops"][0]["name"], "Tea 4711馆", "{found}");
    // Three times this many within a window are below the limit of reads, however fast the server is.
    let requests = count(600, 300) as u32;
    p99(&mut client, requests).await; // warm
    // Other load on the machine adds to the times, so one of a few rounds must pass.
    let mut seen = Vec::new();
    for _ in 0..5 {
        let before = p99(&mut client, requests).await;
        let counts: Arc<[AtomicUsize; 2]> = Arc::default();
        let attackers: Vec<_> = (0..4).map(|_| tokio::spawn(search(shop.address, counts.clone()))).collect();
        // Until the limit is reached, or should be.
        while counts[1].load(Ordering::Relaxed) == 0 && counts[0].load(Ordering::Relaxed) < 300 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let during = p99(&mut client, requests).await;
        attackers.iter().for_each(JoinHandle::abort);
        eprintln!("honest p99 {before:?}, with searches {during:?}; {counts:?} searches answered and refused");
        seen.push((before, during));
        if during <= 2 * before + Duration::from_millis(3) {
            return;
        }
        // After two windows the limit starts again.
        tokio::time::sleep(Duration::from_secs(20)).await;
        // The server has closed the idle connection.
        client = honest(shop.address).await;
    }
    panic!("honest p99 without and with searches: {seen:?}");
}

/// As many searches run as the settings allow. Others wait for a second, and then get `busy`, so that they never reach the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn searches_at_once_are_limited() {
    const AT_ONCE: usize = 3;
    const MORE: usize = 4;
    let server = Kind::Postgres.server().unwrap();
    let database = Proxy::start(server.address()).await.unwrap();
    let storage = Storage::with(Some(Kind::Postgres.create_database(server, database.address().port())));
    let mut command = command(&storage);
    command.env("STAMPEDE__LIMITS__SEARCHES_AT_ONCE", AT_ONCE.to_string()).env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let mut searches = JoinSet::new();
    let search = |searches: &mut JoinSet<(u16, String, Duration)>| {
        let address = shop.address;
        searches.spawn(async move {
            let mut client = Client::connect(address).await.unwrap();
            let started = Instant::now();
            let reply = client.get("/v1/shops?name=tea", "").await.unwrap();
            (reply.status.as_u16(), reply.text("code"), started.elapsed())
        });
    };
    // The database does not answer, so a search that runs stays.
    database.set(Fault::Hang);
    (0..AT_ONCE + MORE).for_each(|_| search(&mut searches));
    for _ in 0..MORE {
        let (status, code, waited) = searches.join_next().await.unwrap().unwrap();
        assert_eq!((status, code.as_str()), (503, "busy"));
        assert!(waited >= Duration::from_millis(900), "{waited:?}");
    }
    assert_eq!(searches.len(), AT_ONCE, "these run");
    // One more waits, and runs when the others are done.
    search(&mut searches);
    database.set(Fault::None);
    while let Some(done) = searches.join_next().await {
        assert_eq!(done.unwrap().0, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_and_documents_are_limited_and_cheap() {
    let storage = temporary_storage();
    let shop = Shop::run(default_settings(&storage));
    let mut client = honest(shop.address).await;
    let mut counts = [0; 2];
    for n in 0..400 {
        let path = if n % 2 == 0 { "/readyz" } else { "/openapi.json" };
        match client.get(path, "").await.unwrap().status.as_u16() {
            200 => counts[0] += 1,
            429 => counts[1] += 1,
            other => panic!("{other}"),
        }
    }
    assert_eq!(counts, [300, 100]);
    // Other addresses are not affected, and /healthz is never limited.
    assert_eq!(shop.client().await.get("/readyz", "").await.unwrap().status, 200);
    assert_eq!(client.get("/healthz", "").await.unwrap().status, 200);
}
