//! One address guesses a phone's codes and requests codes for it, while the phone's owner can still log in.
//!
//! With default settings. Two minutes, or forty with `SOAK=1`; mostly waiting, so it can run in parallel with other tests.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use stampede_testkit::{Client, count};
use tokio::net::TcpSocket;
use tokio::time::{Instant, interval};

use crate::shop::{Shop, TOKEN, default_demo_command, temporary_storage};

const PHONE: &str = "13800138000";
const GUESS_EVERY: Duration = Duration::from_millis(1300);
const REQUEST_EVERY: Duration = Duration::from_secs(20);

/// A client with this loopback address.
async fn client_from(from: [u8; 4], to: SocketAddr) -> Client {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    Client::from_stream(socket.connect(to).await.unwrap()).await.unwrap()
}

/// Guesses with and without the newest challenge in turn, and requests codes, until it is dropped.
async fn attack(shop: SocketAddr) {
    let (mut guesses, mut requests) = (interval(GUESS_EVERY), interval(REQUEST_EVERY));
    let (mut challenge, mut number) = (None, 0);
    loop {
        // A new connection each time: the limits count addresses.
        tokio::select! {
            _ = requests.tick() => {
                let mut client = client_from([127, 0, 0, 2], shop).await;
                let sent = client.post("/v1/login/codes", "", &json!({ "phone": PHONE })).await.unwrap();
                if sent.status == 200 {
                    challenge = Some(sent.text("challenge"));
                }
            }
            _ = guesses.tick() => {
                number += 1;
                let mut guess = json!({ "phone": PHONE, "code": format!("{:06}", number * 7919 % 1_000_000) });
                if let Some(challenge) = challenge.as_ref().filter(|_| number % 2 == 0) {
                    guess["challenge"] = json!(challenge);
                }
                let mut client = client_from([127, 0, 0, 2], shop).await;
                client.post("/v1/login", "", &guess).await.unwrap();
            }
        }
    }
}

/// Requests a code and uses it, with its challenge or, like an older client, without.
async fn log_in(shop: SocketAddr, with_challenge: bool) -> bool {
    let mut client = client_from([127, 0, 0, 3], shop).await;
    let sent = client.post("/v1/login/codes", "", &json!({ "phone": PHONE })).await.unwrap();
    if sent.status != 200 {
        return false;
    }
    let mut login = json!({ "phone": PHONE, "code": sent.text("demo_code") });
    if with_challenge {
        login["challenge"] = json!(sent.text("challenge"));
    }
    client.post("/v1/login", "", &login).await.unwrap().status == 200
}

/// The number of compared codes with this many digits.
async fn compared(shop: &Shop, digits: u32) -> f64 {
    let text = shop.client().await.get("/metrics", TOKEN).await.unwrap();
    let text = String::from_utf8(text.body.to_vec()).unwrap();
    let name = format!("stampede_login_tries_total{{digits=\"{digits}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0.0, |count| count.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guesser_neither_locks_the_owner_out_nor_gets_in() {
    let (seconds, logins) = (count(40 * 60, 120), count(20, 4));
    let storage = temporary_storage();
    let shop = Shop::run(default_demo_command(&storage));
    let guesser = tokio::spawn(attack(shop.address));
    let ends = Instant::now() + Duration::from_secs(seconds);
    let mut turns = interval(Duration::from_secs(seconds / logins));
    let mut done = 0;
    for n in 0..logins {
        turns.tick().await;
        done += u64::from(log_in(shop.address, n % 2 == 0).await);
    }
    tokio::time::sleep_until(ends).await;
    assert!(!guesser.is_finished(), "the attack stopped: {:?}", guesser.await);
    guesser.abort();

    let (six, ten) = (compared(&shop, 6).await - done as f64, compared(&shop, 10).await);
    let chance = six * 1e-6 + ten * 1e-10;
    eprintln!(
        "in {seconds} s the owner logged in {done} of {logins} times; {six} guesses at six digits and {ten} at ten were compared: a chance of {chance:.1e}"
    );
    assert!(done * 20 >= logins * 19, "the owner logged in {done} of {logins} times");
    assert!(six >= 5.0, "the attack was none");
    assert!(chance < 1e-4, "the guesser's chance is {chance:.1e}");
}
