//! Hostile requests, generated from the OpenAPI document: every route, member and parameter. No request may lead to a 5xx, a hang or
//! growing memory, and every reply is compared with the document (see [`crate::contract`]).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::body::Body as _;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use stampede_testkit::{Client, count};

use crate::contract::{DOCUMENT, ROUTES, Route};
use crate::shop::{Kind, Shop, Storage, TOKEN, command, log_in};

const LANES: u64 = 8;

/// Texts that often cause errors.
const TEXTS: [&str; 20] = [
    "",
    " ",
    "\0",
    "a\0b",
    "\u{feff}",
    "\u{202e}abc",
    "💥𝕏\u{1f468}\u{200d}\u{1f469}",
    "ｆｕｌｌ",
    "e\u{301}\u{301}\u{301}",
    "%",
    "_%_\\",
    "'; DROP TABLE orders; --",
    "\"\\'`",
    "../../../etc/passwd",
    "{{7*7}}${7*7}",
    "<script>alert(1)</script>",
    "\r\nset-cookie: x=1",
    "NaN",
    "-0",
    "9223372036854775808",
];

fn number(rng: &mut StdRng) -> Value {
    match rng.random_range(0..12) {
        0 => json!(0),
        1 => json!(-1),
        2 => json!(i64::MIN),
        3 => json!(i64::MAX),
        4 => json!(u64::MAX),
        5 => json!(0.5),
        6 => json!(1e308),
        7 => json!(u32::MAX),
        8 => json!(1_000_000_001_u64),
        _ => json!(rng.random_range(0..20_000_000)),
    }
}

fn text(rng: &mut StdRng) -> String {
    match rng.random_range(0..10) {
        0 => "长".repeat(rng.random_range(0..2000)),
        1 => (0..rng.random_range(1..40))
            .map(|_| char::from_u32(rng.random_range(0..0x11_0000)).unwrap_or('x'))
            .collect(),
        2 => rng.random::<u64>().to_string(),
        _ => TEXTS[rng.random_range(0..TEXTS.len())].to_owned(),
    }
}

/// An arbitrary JSON value.
fn any_value(rng: &mut StdRng, depth: u32) -> Value {
    match rng.random_range(0..if depth > 3 { 4 } else { 6 }) {
        0 => Value::Null,
        1 => json!(rng.random_range(0..2) == 0),
        2 => number(rng),
        3 => json!(text(rng)),
        4 => (0..rng.random_range(0..4)).map(|_| any_value(rng, depth + 1)).collect(),
        _ => (0..rng.random_range(0..4)).map(|_| (text(rng), any_value(rng, depth + 1))).collect(),
    }
}

struct RequestGenerator {
    rng: StdRng,
    /// The token of an open session.
    buyer: String,
    /// Ids of every kind, so that some have the wrong kind.
    ids: Vec<String>,
}

/// The number of ids that a task keeps.
const MAX_IDS: usize = 100;

impl RequestGenerator {
    fn chance(&mut self, percent: u64) -> bool {
        self.rng.random_range(0..100) < percent
    }

    fn id(&mut self) -> String {
        self.ids[self.rng.random_range(0..self.ids.len())].clone()
    }

    /// Keeps a new id for later requests.
    fn add_id(&mut self, id: String) {
        if self.ids.len() < MAX_IDS {
            self.ids.push(id);
        } else {
            let index = self.rng.random_range(0..MAX_IDS);
            self.ids[index] = id;
        }
    }

    /// A value that matches the schema, or sometimes does not.
    fn value(&mut self, schema: &Value) -> Value {
        if self.chance(3) {
            return any_value(&mut self.rng, 0);
        }
        if let Some(name) = schema["$ref"].as_str() {
            return self.value(DOCUMENT.pointer(name.trim_start_matches('#')).unwrap());
        }
        if let Some(choices) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
            let choice = self.rng.random_range(0..choices.len());
            return self.value(&choices[choice]);
        }
        if let Some(words) = schema["enum"].as_array() {
            return words[self.rng.random_range(0..words.len())].clone();
        }
        let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str()).unwrap_or_default();
        match kind {
            "object" => {
                let mut object = serde_json::Map::new();
                for (name, member) in schema["properties"].as_object().into_iter().flatten() {
                    if !self.chance(4) {
                        object.insert(name.clone(), self.value(member));
                    }
                }
                if self.chance(4) {
                    object.insert(text(&mut self.rng), any_value(&mut self.rng, 0));
                }
                Value::Object(object)
            }
            "array" => (0..self.rng.random_range(0..4)).map(|_| self.value(&schema["items"])).collect(),
            "integer" | "number" if self.chance(70) => {
                let (low, high) = (schema["minimum"].as_u64().unwrap_or(0), schema["maximum"].as_u64().unwrap_or(100));
                json!(self.rng.random_range(low..high + 1))
            }
            "integer" | "number" => number(&mut self.rng),
            "boolean" => json!(self.chance(50)),
            _ => json!(self.string(schema)),
        }
    }

    fn string(&mut self, schema: &Value) -> String {
        let pattern = schema["pattern"].as_str().unwrap_or_default();
        if self.chance(8) {
            return text(&mut self.rng);
        }
        match (schema["format"].as_str().unwrap_or_default(), pattern) {
            ("date-time", _) => {
                let year = self.rng.random_range(1960..2100);
                format!("{year}-{:02}-01T12:00:00Z", self.rng.random_range(1..13))
            }
            (_, pattern) if pattern.starts_with("^[1-9]") => self.id(),
            (_, pattern) if pattern.starts_with("^1[3-9]") => format!("139{:08}", self.rng.random_range(0..1000)),
            (_, pattern) if pattern.starts_with("^[0-9]{6}") => format!("{:06}", self.rng.random_range(0..1_000_000)),
            (_, pattern) if pattern.starts_with("^[0-9a-f]{32}") => format!("{:032x}", self.rng.random::<u64>()),
            _ => format!("text {}", self.rng.random_range(0..1000)),
        }
    }

    fn escaped(&mut self, text: &str) -> String {
        let mut escaped = String::new();
        for byte in text.bytes() {
            if byte.is_ascii_alphanumeric() {
                escaped.push(char::from(byte));
            } else {
                write!(escaped, "%{byte:02x}").unwrap();
            }
        }
        if self.chance(2) {
            escaped.push_str("%ff");
        }
        escaped
    }

    fn target(&mut self, route: &Route) -> String {
        let mut path = route.path.clone();
        let mut query = String::new();
        for parameter in route.operation["parameters"].as_array().into_iter().flatten() {
            let value = match self.value(&parameter["schema"]) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let value = self.escaped(&value.chars().take(500).collect::<String>());
            if parameter["in"] == "path" {
                // An empty parameter would be another path.
                path = path.replace("{id}", if value.is_empty() { "0" } else { &value });
            } else if self.chance(60) {
                write!(query, "&{}={value}", parameter["name"].as_str().unwrap()).unwrap();
            }
        }
        if self.chance(3) {
            let junk = text(&mut self.rng);
            let junk = self.escaped(&junk.chars().take(500).collect::<String>());
            write!(query, "&{junk}").unwrap();
        }
        if query.is_empty() { path } else { format!("{path}?{}", &query[1..]) }
    }

    fn token(&mut self, route: &Route) -> String {
        let buyer = self.buyer.clone();
        if self.chance(12) {
            return match self.rng.random_range(0..4) {
                0 => String::new(),
                1 => TOKEN.to_owned(),
                2 => buyer,
                _ => format!("{:x}", self.rng.random::<u64>()),
            };
        }
        match route.operation["security"][0].as_object() {
            Some(who) if who.contains_key("admin") => TOKEN.to_owned(),
            Some(_) => buyer,
            None => String::new(),
        }
    }

    fn body(&mut self, route: &Route) -> Vec<u8> {
        let schema = &route.operation["requestBody"]["content"]["application/json"]["schema"];
        match self.rng.random_range(0..100) {
            0..2 => vec![b'['; self.rng.random_range(1..15_000)],
            2..4 => (0..self.rng.random_range(0..200)).map(|_| self.rng.random::<u8>()).collect(),
            4..6 => vec![b'1'; self.rng.random_range(1..40_000)],
            6..8 => Vec::new(),
            _ if schema.is_null() => Vec::new(),
            _ => self.value(schema).to_string().into_bytes(),
        }
    }

    fn request(&mut self, route: &Route) -> Request<Full<Bytes>> {
        let kind = if self.chance(95) { "application/json" } else { "text/plain; charset=x" };
        let language = if self.chance(50) { "zh-CN" } else { "en" };
        let request = Request::builder().method(route.method.clone()).uri(self.target(route)).header("host", "x");
        let request = request.header("accept-language", language).header("content-type", kind);
        let token = self.token(route);
        let request =
            if token.is_empty() { request } else { request.header("authorization", format!("Bearer {token}")) };
        request.body(Full::from(self.body(route))).unwrap()
    }
}

/// Sends a part of the requests; counts the replies by status.
async fn lane(address: SocketAddr, lane: u64, seed: u64, ids: Vec<String>, todo: &AtomicU64) -> BTreeMap<u16, usize> {
    let mut statuses = BTreeMap::new();
    let mut client = Client::connect(address).await.unwrap();
    let phone = format!("150{lane:08}");
    let mut generator =
        RequestGenerator { rng: StdRng::seed_from_u64(seed), buyer: log_in(&mut client, &phone).await.token, ids };
    while todo.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
        let route = &ROUTES[generator.rng.random_range(0..ROUTES.len())];
        let request = generator.request(route);
        let shown = format!("seed {seed}: {request:?}");
        // If the server does not read the whole body, it closes the connection, possibly before the response is read.
        let length = request.body().size_hint().lower();
        let unread = length > 16 * 1024 || (length > 0 && route.operation["requestBody"].is_null());
        match client.send(request).await {
            Ok(reply) => {
                assert!(reply.status.as_u16() < 500, "{shown}: {} {:?}", reply.status, reply.body);
                *statuses.entry(reply.status.as_u16()).or_insert(0) += 1;
                if reply.status == 201 {
                    generator.add_id(reply.text("id"));
                }
                let ended = reply.status == 204;
                if unread || !reply.header("connection").is_empty() {
                    client = Client::connect(address).await.unwrap();
                }
                if ended {
                    // The request may have ended this session.
                    generator.buyer = log_in(&mut client, &phone).await.token;
                }
            }
            Err(error) => {
                assert!(unread, "{shown}: {error}");
                client = Client::connect(address).await.unwrap();
            }
        }
    }
    statuses
}

/// The memory of the server that is in use.
pub fn resident_bytes(shop: &Shop) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", shop.process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() * 1024
}

async fn fuzz(kind: Kind, requests: u64, seed: u64) {
    let storage = Storage::on(kind);
    let mut command = command(&storage);
    for budget in ["CODES_PER_PHONE", "CODES_PER_PHONE_DAY"] {
        command.env(format!("STAMPEDE__LOGIN__{budget}__COUNT"), "1000000");
    }
    let shop = Shop::run(command);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 5).await;
    let mut ids = vec![sale.to_string(), "1".to_owned(), "2".to_owned()];
    let mut client = shop.client().await;
    for buyer in &buyers {
        let order = client.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap();
        ids.push(order.text("id"));
    }
    let seen = client.get(&format!("/v1/sales/{sale}"), "").await.unwrap();
    ids.push(seen.text("voucher_id"));
    let shops = client.get("/v1/shops", "").await.unwrap().json();
    ids.extend(shops["shops"].as_array().unwrap().iter().map(|shop| shop["id"].as_str().unwrap().to_owned()));

    let mut rss = Vec::new();
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for (round, share) in [requests / 10, requests - requests / 10].into_iter().enumerate() {
        let todo = Arc::new(AtomicU64::new(share));
        let lanes: Vec<_> = (0..LANES)
            .map(|lane_no| {
                let (address, ids, todo) = (shop.address, ids.clone(), todo.clone());
                let seed = seed + round as u64 * LANES + lane_no;
                tokio::spawn(async move { lane(address, lane_no, seed, ids, &todo).await })
            })
            .collect();
        for lane in lanes {
            for (status, count) in lane.await.unwrap() {
                *statuses.entry(status).or_insert(0) += count;
            }
        }
        rss.push(resident_bytes(&shop));
    }
    eprintln!("{kind:?}: {statuses:?}, resident {} → {} MiB", rss[0] >> 20, rss[1] >> 20);
    for status in [200, 201, 204, 400, 401, 404, 409, 415, 422] {
        assert!(statuses.contains_key(&status), "no {status} among {statuses:?}: too few kinds of responses");
    }
    assert!(rss[1] < rss[0] + (64 << 20), "memory grows: {rss:?}");
    // Afterwards the server still sells.
    let late = shop.log_in(5_000, 1).await.remove(0);
    let sale = shop.create_sale(1).await;
    let reply = shop.client().await.post(&format!("/v1/sales/{sale}/orders"), &late.token, &Value::Null).await.unwrap();
    assert_eq!(reply.status, 201, "{reply:?}");
}

async fn hostile_requests_get_no_5xx(kind: Kind) {
    let (requests, seed) = match kind {
        Kind::Sqlite => (count(100_000, 3_000), 1),
        Kind::MariaDb => (count(30_000, 3_000), 1_000),
        Kind::Postgres => (count(30_000, 3_000), 2_000),
    };
    fuzz(kind, requests, seed).await;
}

on_each_database!(hostile_requests_get_no_5xx);
