//! Login by code: challenges, send budgets, the proof of work.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use hyper::{Method, Request};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stampede_testkit::{Client, Reply, count};

use crate::shop::{Shop, Storage, command, log_in, temporary_storage};

const PHONE: &str = "13800138000";

async fn request_code(client: &mut Client, phone: &str) -> Reply {
    client.post("/v1/login/codes", "", &json!({ "phone": phone })).await.unwrap()
}

/// A login with the challenge of this reply.
async fn guess(client: &mut Client, sent: &Reply, code: &str) -> Reply {
    let guess = json!({ "phone": PHONE, "code": code, "challenge": sent.text("challenge") });
    client.post("/v1/login", "", &guess).await.unwrap()
}

/// A code that differs from the one in this reply.
fn wrong(sent: &Reply) -> String {
    let code = sent.text("demo_code");
    let last = if code.ends_with('0') { '1' } else { '0' };
    format!("{}{last}", &code[..code.len() - 1])
}

/// The answer to a puzzle of ten bits.
pub fn solve(puzzle: &str, phone: &str) -> String {
    let answer = (0_u32..).find(|answer| {
        let hash = Sha256::digest(format!("{puzzle}:{phone}:{answer}"));
        hash[0] == 0 && hash[1] < 64
    });
    answer.unwrap().to_string()
}

/// Posts as a client with this address behind a trusted proxy.
pub async fn post_from(client: &mut Client, address: &str, path: &str, body: &Value) -> Reply {
    let request = Request::builder().method(Method::POST).uri(path).header("host", "localhost");
    let request = request.header("content-type", "application/json").header("x-forwarded-for", address);
    client.send(request.body(body.to_string().into()).unwrap()).await.unwrap()
}

fn behind_proxy(storage: &Storage) -> Command {
    let settings = storage.path().join("settings.toml");
    std::fs::write(&settings, "[http]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").unwrap();
    let mut command = command(storage);
    command.arg("--config").arg(settings);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn code_works_once_for_its_phone() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let phone = PHONE;
    let sent = request_code(&mut client, phone).await;
    let code = sent.text("demo_code");
    let mut login = async |phone: &str, code: &str| {
        client.post("/v1/login", "", &json!({ "phone": phone, "code": code })).await.unwrap()
    };
    assert_eq!(login("13800138001", &code).await.text("code"), "wrong_code", "another phone");
    assert_eq!(login(phone, &wrong(&sent)).await.text("code"), "wrong_code");
    let first = login(phone, &code).await;
    assert_eq!(first.status, 200);
    assert_eq!(login(phone, &code).await.text("code"), "wrong_code", "single use");

    let token = first.text("token");
    let me = client.get("/v1/me", &token).await.unwrap();
    assert_eq!(me.json()["id"], first.json()["user"]["id"]);
    assert_eq!(me.text("phone"), "138****8000");
    assert_eq!(client.call(Method::DELETE, "/v1/session", &token, &Value::Null).await.unwrap().status, 204);
    assert_eq!(client.get("/v1/me", &token).await.unwrap().text("code"), "unauthorized", "revoked at once");

    let again = log_in(&mut client, phone).await;
    assert_eq!(first.json()["user"]["id"], again.id.to_string(), "the phone keeps its user");
}

/// The first login creates the user with a generated nickname, which later logins keep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_login_generates_a_nickname_that_stays() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let mut nicknames = Vec::new();
    for _ in 0..2 {
        let sent = request_code(&mut client, PHONE).await;
        let reply = guess(&mut client, &sent, &sent.text("demo_code")).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        nicknames.push(reply.json()["user"]["nickname"].as_str().unwrap().to_owned());
        let me = client.get("/v1/me", &reply.text("token")).await.unwrap();
        nicknames.push(me.text("nickname"));
    }
    let digits = nicknames[0].strip_prefix("user_").unwrap_or_default();
    let is_hex_digit = |c: char| c.is_ascii_digit() || matches!(c, 'a'..='f');
    assert!(digits.len() == 8 && digits.chars().all(is_hex_digit), "{nicknames:?}");
    assert!(nicknames.iter().all(|nickname| *nickname == nicknames[0]), "{nicknames:?}");
    let sent = request_code(&mut client, "13800138001").await;
    let login = json!({ "phone": "13800138001", "code": sent.text("demo_code"), "challenge": sent.text("challenge") });
    let other = client.post("/v1/login", "", &login).await.unwrap();
    assert_ne!(other.json()["user"]["nickname"], nicknames[0].as_str(), "another user has another one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_do_not_reveal_whether_a_number_is_registered() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let (known, unknown) = (PHONE, "13800138001");
    log_in(&mut client, known).await;
    let mut reply = Vec::new();
    for phone in [known, unknown] {
        // Without a code, with one, and after a wrong one.
        let guess = json!({ "phone": phone, "code": "000000" });
        let before = client.post("/v1/login", "", &guess).await.unwrap();
        let sent = request_code(&mut client, phone).await;
        let after = client.post("/v1/login", "", &json!({ "phone": phone, "code": wrong(&sent) })).await.unwrap();
        let sent = (sent.status, sent.json()["expires_in_s"].clone());
        reply.push((before.status, before.body, sent, after.status, after.body));
    }
    assert_eq!(reply[0], reply[1]);
    assert_eq!(reply[0].0, 422);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn challenge_is_invalidated_after_five_wrong_attempts() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let mut client = shop.client().await;
    let (first, second) = (request_code(&mut client, PHONE).await, request_code(&mut client, PHONE).await);
    assert_ne!(first.text("challenge"), second.text("challenge"));
    for _ in 0..5 {
        assert_eq!(guess(&mut client, &first, &wrong(&first)).await.text("code"), "wrong_code");
    }
    let right = first.text("demo_code");
    assert_eq!(guess(&mut client, &first, &right).await.text("code"), "wrong_code", "no attempts left");
    if second.text("demo_code") != right {
        assert_eq!(
            guess(&mut client, &second, &right).await.text("code"),
            "wrong_code",
            "the code of another challenge"
        );
    }
    assert_eq!(guess(&mut client, &second, &second.text("demo_code")).await.status, 200);
    let unknown = json!({ "phone": PHONE, "code": "000000", "challenge": "0".repeat(32) });
    assert_eq!(client.post("/v1/login", "", &unknown).await.unwrap().text("code"), "wrong_code");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn login_without_challenge_uses_the_newest_of_the_address() {
    let storage = temporary_storage();
    let shop = Shop::run(behind_proxy(&storage));
    let mut client = shop.client().await;
    let (mine, other) = ("192.0.2.1", "192.0.2.2");
    let mut codes = Vec::new();
    for from in [mine, mine, other] {
        let sent = post_from(&mut client, from, "/v1/login/codes", &json!({ "phone": PHONE })).await;
        codes.push(sent.text("demo_code"));
    }
    let mut login = async |from: &str, code: &str| {
        post_from(&mut client, from, "/v1/login", &json!({ "phone": PHONE, "code": code })).await.status.as_u16()
    };
    for (from, code, expected) in [(mine, &codes[0], 422), (mine, &codes[2], 422), ("192.0.2.3", &codes[1], 422)] {
        if codes.iter().filter(|one| *one == code).count() == 1 {
            assert_eq!(login(from, code).await, expected);
        }
    }
    assert_eq!(login(mine, &codes[1]).await, 200);
    // Addresses of one /64 count as one.
    let sent = post_from(&mut client, "2001:db8::1", "/v1/login/codes", &json!({ "phone": PHONE })).await;
    let code = json!({ "phone": PHONE, "code": sent.text("demo_code") });
    assert_eq!(post_from(&mut client, "2001:db8::2", "/v1/login", &code).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_five_of_a_thousand_parallel_guesses_are_compared() {
    let storage = temporary_storage();
    let shop = Shop::run(behind_proxy(&storage));
    let sent = request_code(&mut shop.client().await, PHONE).await;
    let (lanes, each) = (count(100, 40) as u8, 10_usize.max(count(10, 5) as usize));
    let guesses: Vec<_> = (0..lanes)
        .map(|lane| {
            let (address, wrong, challenge) = (shop.address, wrong(&sent), sent.text("challenge"));
            tokio::spawn(async move {
                let mut client = Client::connect(address).await.unwrap();
                let guess = json!({ "phone": PHONE, "code": wrong, "challenge": challenge });
                for _ in 0..each {
                    let reply = post_from(&mut client, &format!("192.0.2.{lane}"), "/v1/login", &guess).await;
                    assert_eq!(reply.text("code"), "wrong_code");
                }
            })
        })
        .collect();
    for one in guesses {
        one.await.unwrap();
    }
    assert_eq!(shop.metric("stampede_login_tries_total{digits=\"6\"}").await, 5.0);
    assert_eq!(guess(&mut shop.client().await, &sent, &sent.text("demo_code")).await.status, 422);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codes_have_ten_digits_after_a_hundred_failures_until_a_login() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    for budget in ["CODES_PER_PHONE", "CODES_PER_PHONE_DAY"] {
        command.env(format!("STAMPEDE__LOGIN__{budget}__COUNT"), "1000000");
    }
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    for n in 0..20 {
        let sent = request_code(&mut client, PHONE).await;
        assert_eq!(sent.text("demo_code").len(), 6, "after {} failures", 5 * n);
        let tries: Vec<_> = (0..5)
            .map(|_| {
                let (address, sent) = (shop.address, sent.clone());
                tokio::spawn(async move {
                    let mut client = Client::connect(address).await.unwrap();
                    guess(&mut client, &sent, &wrong(&sent)).await.status.as_u16()
                })
            })
            .collect();
        for one in tries {
            assert_eq!(one.await.unwrap(), 422);
        }
    }
    let sent = request_code(&mut client, PHONE).await;
    assert_eq!(sent.text("demo_code").len(), 10);
    assert_eq!(guess(&mut client, &sent, &sent.text("demo_code")[..6]).await.status, 422, "a part is not enough");
    assert_eq!(guess(&mut client, &sent, &sent.text("demo_code")).await.status, 200);
    assert_eq!(request_code(&mut client, PHONE).await.text("demo_code").len(), 6, "a login resets the failures");
    assert_eq!(request_code(&mut client, "13800138001").await.text("demo_code").len(), 6, "another phone");
}

/// With a pending code, an attempt costs a write; without one, it does not. The difference must not be visible from outside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn login_timing_does_not_reveal_whether_a_code_was_sent() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__LOGIN__CODE_TRIES", "1000000");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let sent = request_code(&mut client, PHONE).await;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..count(100, 15) {
        for (phone, times) in [PHONE, "13800138001"].into_iter().zip(&mut times) {
            let guess = json!({ "phone": phone, "code": wrong(&sent) });
            let started = Instant::now();
            assert_eq!(client.post("/v1/login", "", &guess).await.unwrap().status, 422);
            times.push(started.elapsed());
        }
    }
    assert!(times.iter().flatten().all(|time| *time >= Duration::from_millis(100)), "{times:?}");
    let [out, none] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2]
    });
    eprintln!("median of a refused login: {out:?} with a code out, {none:?} without");
    assert!(out.abs_diff(none) < Duration::from_millis(20), "{out:?} with a code out, {none:?} without");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_send_budgets_are_counted_and_logged_once_a_minute() {
    let storage = temporary_storage();
    let log = storage.path().join("log");
    let mut command = behind_proxy(&storage);
    command.stderr(File::create(&log).unwrap()).env("STAMPEDE__LOG__LEVEL", "warn");
    for (budget, count) in [
        ("CODES_PER_PHONE_DAY", "4"),
        ("CODES_PER_ADDRESS", "10"),
        ("CODES_PER_IPV6_56", "12"),
        ("CODES_PER_IPV6_48", "14"),
        ("CODES_PER_SHOP", "40"),
    ] {
        command.env(format!("STAMPEDE__LOGIN__{budget}__COUNT"), count);
    }
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    let mut granted = async |phones: std::ops::Range<u32>, address: &dyn Fn(u32) -> String| {
        let mut granted = 0;
        for n in phones {
            let body = json!({ "phone": format!("138{:08}", n) });
            let sent = post_from(&mut client, &address(n), "/v1/login/codes", &body).await;
            match sent.status.as_u16() {
                200 => granted += 1,
                429 => assert!(sent.header("retry-after").parse::<u64>().unwrap() >= 1),
                status => panic!("{status}"),
            }
        }
        granted
    };
    let same = |address: &'static str| move |_: u32| address.to_owned();
    assert_eq!(granted(0..15, &same("192.0.2.1")).await, 10, "one address");
    assert_eq!(granted(0..15, &|n| format!("2001:db8:0:{n:x}::1")).await, 12, "one /56");
    assert_eq!(granted(20..40, &|n| format!("2001:db8:0:{:x}::1", n << 8)).await, 2, "one /48, with the twelve before");
    for address in ["192.0.2.3", "192.0.2.4", "192.0.2.5"] {
        let mut granted = 0;
        for _ in 0..3 {
            let body = json!({ "phone": "13900000000" });
            let sent = post_from(&mut shop.client().await, address, "/v1/login/codes", &body).await;
            granted += u32::from(sent.status == 200);
        }
        assert_eq!(granted, if address == "192.0.2.5" { 0 } else { 2 }, "half of the phone's four, from {address}");
    }
    assert_eq!(granted(50..80, &|n| format!("198.51.100.{n}")).await, 12, "forty by the shop");

    for (budget, refused) in
        [("phone_day", 5.0), ("address", 5.0), ("ipv6_56", 3.0), ("ipv6_48", 18.0), ("shop", 18.0), ("phone", 0.0)]
    {
        let metric = format!("stampede_send_budget_spent_total{{budget=\"{budget}\"}}");
        assert_eq!(shop.metric(&metric).await, refused, "{budget}");
        let log = std::fs::read_to_string(&log).unwrap();
        let lines = log.lines().filter(|line| line.contains(&format!("budget=\"{budget}\"")));
        assert_eq!(lines.count(), usize::from(refused > 0.0), "{budget}: {log}");
        assert!(!log.contains("13900000000"), "phones are masked");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proof_of_work_is_required_if_configured() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.env("STAMPEDE__LOGIN__PROOF_OF_WORK_BITS", "10");
    let shop = Shop::run(command);
    let mut client = shop.client().await;
    assert_eq!(request_code(&mut client, PHONE).await.text("code"), "proof_required");
    let puzzle = client.get("/v1/login/puzzle", "").await.unwrap();
    assert_eq!(puzzle.json()["bits"], 10);
    let puzzle = puzzle.text("puzzle");
    let solved = json!({ "phone": PHONE, "puzzle": puzzle, "answer": solve(&puzzle, PHONE) });
    let sent = client.post("/v1/login/codes", "", &solved).await.unwrap();
    assert_eq!(guess(&mut client, &sent, &sent.text("demo_code")).await.status, 200);
    let again = client.post("/v1/login/codes", "", &solved).await.unwrap();
    assert_eq!((again.status.as_u16(), again.text("code").as_str()), (422, "proof_required"), "each works once");

    let storage = crate::shop::temporary_storage();
    let off = Shop::open(&storage);
    let puzzle = off.client().await.get("/v1/login/puzzle", "").await.unwrap();
    assert_eq!(puzzle.json()["bits"], 0, "off by default");
}
