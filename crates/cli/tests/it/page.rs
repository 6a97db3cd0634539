//! The page for buyers in a real browser: Chromium, driven by its driver over HTTP (WebDriver).

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use stampede_core::{Clock as _, SystemClock};
use stampede_testkit::{Process, until};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::shop::{Shop, command, temporary_storage};

/// A browser with one tab. It ends with its driver, because the pipe between them closes.
struct Browser {
    driver: SocketAddr,
    session: String,
    _process: Process,
    _profile: TempDir,
}

impl Browser {
    async fn start() -> Self {
        let mut command = Command::new("chromedriver");
        command.args(["--port=0", "--allowed-ips=127.0.0.1"]);
        let mut process = Process::start(command).unwrap();
        let port = process.wait_for(Duration::from_secs(60), |line| {
            line.split_once("started successfully on port ")?.1.trim_end_matches('.').parse::<u16>().ok()
        });
        let driver = SocketAddr::from(([127, 0, 0, 1], port.expect("chromedriver did not start")));
        let profile = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let arguments = [
            "--headless",
            // Chromium refuses to run as root with its sandbox.
            "--no-sandbox",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--lang=en-US",
            "--window-size=1200,2000",
            &format!("--user-data-dir={}", profile.path().display()),
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": { "args": arguments } } } });
        let started = send(driver, "POST", "/session", &wanted).await;
        let session = started["sessionId"].as_str().unwrap_or_else(|| panic!("{started}")).to_owned();
        Self { driver, session, _process: process, _profile: profile }
    }

    /// Sends a command of the session. Panics if the browser cannot carry it out.
    async fn command(&self, path: &str, body: &Value) -> Value {
        let value = send(self.driver, "POST", &format!("/session/{}/{path}", self.session), body).await;
        assert!(value["error"].is_null(), "{path} {body}: {value}");
        value
    }

    async fn open(&self, shop: &Shop) {
        self.command("url", &json!({ "url": format!("http://{}/", shop.address) })).await;
    }

    /// The value of an expression in the page.
    async fn value(&self, expression: &str) -> Value {
        self.command("execute/sync", &json!({ "script": format!("return {expression}"), "args": [] })).await
    }

    async fn text(&self, selector: &str) -> String {
        let value = self.value(&format!("document.querySelector({selector:?})?.textContent")).await;
        value.as_str().unwrap_or_default().to_owned()
    }

    async fn until_text(&self, selector: &str, is_expected: impl Fn(&str) -> bool) {
        until(selector, async || is_expected(&self.text(selector).await)).await;
    }

    async fn element(&self, selector: &str) -> String {
        let found = self.command("element", &json!({ "using": "css selector", "value": selector })).await;
        found.as_object().unwrap().values().next().unwrap().as_str().unwrap().to_owned()
    }

    /// Clicks on an element as a user does, once it is shown and enabled.
    async fn click(&self, selector: &str) {
        until(selector, async || {
            let element = format!("document.querySelector({selector:?})");
            self.value(&format!("{element}?.checkVisibility() && !{element}.disabled")).await == true
        })
        .await;
        let element = self.element(selector).await;
        self.command(&format!("element/{element}/click"), &json!({})).await;
    }

    async fn write(&self, selector: &str, text: &str) {
        let element = self.element(selector).await;
        self.command(&format!("element/{element}/value"), &json!({ "text": text })).await;
    }

    async fn accept_question(&self) {
        self.command("alert/accept", &json!({})).await;
    }

    async fn log_in(&self, phone: &str) {
        self.write("#phone", phone).await;
        self.click("#phone-form button").await;
        until("the demo fills in the code", async || self.value("document.querySelector('#code').value").await != "")
            .await;
        self.click("#code-form button").await;
        until("the user is logged in", async || self.value("document.querySelector('#mine').hidden").await == false)
            .await;
    }

    /// Gives the card of the sale with this title an id.
    async fn name_sale(&self, title: &str, id: &str) {
        let card = format!(
            "[...document.querySelectorAll('.sale')].find(c => c.querySelector('h3').textContent === {title:?})"
        );
        until("the sale is shown", async || self.value(&format!("Boolean({card})")).await == true).await;
        self.value(&format!("({card}).id = {id:?}")).await;
    }
}

/// One request over a connection of its own. The client of the other tests compares responses with our OpenAPI document.
async fn send(driver: SocketAddr, method: &str, path: &str, body: &Value) -> Value {
    let body = body.to_string();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(driver).await.unwrap();
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    let reading = async {
        let mut reader = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).await.unwrap();
            match line.trim_end().split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse().unwrap();
                }
                None if line.trim_end().is_empty() => break,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).await.unwrap();
        body
    };
    let body = tokio::time::timeout(Duration::from_secs(60), reading).await.expect("the driver does not answer");
    let mut reply: Value = serde_json::from_slice(&body).unwrap();
    reply["value"].take()
}

/// Creates a sale of one item with this title.
async fn create_sale(shop: &Shop, title: &str, payment_deadline_ms: u64) {
    let (now, of) = (SystemClock.now(), shop.admin("shops", &json!({ "type_id": "1", "name": "Test shop" })).await);
    let voucher = json!({
        "shop_id": of.text("id"), "kind": "flash_sale", "title": title, "price_cents": 100, "worth_cents": 200,
    });
    let voucher = shop.admin("vouchers", &voucher).await.text("id");
    let sale = json!({
        "voucher_id": voucher, "stock": 1, "begin": now, "end": now.plus(Duration::from_secs(3600)),
        "payment_deadline_ms": payment_deadline_ms,
    });
    let made = shop.admin("sales", &sale).await;
    assert_eq!(made.status, 201, "{:?}", made.body);
}

/// A user logs in, buys, cancels, buys again, pays and shows the code; the shop redeems it. An order that is not paid in time is cancelled.
/// The page shows each change by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_bought_paid_and_redeemed_in_the_browser() {
    let storage = temporary_storage();
    let shop = Shop::run(command(&storage));
    create_sale(&shop, "Lunch", 600_000).await;
    create_sale(&shop, "Breakfast", 4_000).await;
    let browser = Browser::start().await;
    browser.open(&shop).await;
    browser.name_sale("Lunch", "lunch").await;
    browser.name_sale("Breakfast", "breakfast").await;
    browser.log_in("13800138000").await;

    // The newest order is the first.
    let status = ".order .badge";
    browser.click("#lunch .buy").await;
    browser.until_text(status, |text| text == "Unpaid").await;
    browser.until_text(".order .timer", |text| text.starts_with("Pay within 00:0")).await;
    let shown = browser.text(".order .timer").await;
    browser.until_text(".order .timer", |text| text.starts_with("Pay within 00:0") && text < shown.as_str()).await;
    browser.until_text("#lunch .badge", |text| text == "Sold out").await;
    browser.click(".order .cancel").await;
    browser.accept_question().await;
    browser.until_text(status, |text| text == "Cancelled").await;

    // The page learns that there is stock again.
    browser.click("#lunch .buy").await;
    browser.until_text(status, |text| text == "Unpaid").await;
    browser.click(".order .pay").await;
    browser.until_text(status, |text| text == "Paid").await;
    browser.click(".order .toggle-code").await;
    browser.until_text(".order .code", |text| text.starts_with("Code for the shop: ")).await;
    let code = browser.text(".order .code").await;
    let code = code.trim_start_matches("Code for the shop: ");

    let id = paid_order(&shop).await;
    let redeemed = shop.admin(&format!("orders/{id}/redeem"), &json!({ "code": code })).await;
    assert_eq!(redeemed.status, 200, "{:?}", redeemed.body);
    browser.until_text(status, |text| text == "Used").await;
    assert_eq!(browser.text(".order .code").await, "");
    browser.click(".order .toggle-history").await;
    browser.until_text(".order .history", |text| text.contains("Paid") && text.contains("Used")).await;
    browser.click("#language").await;
    browser.until_text(status, |text| text == "已使用").await;

    browser.click("#breakfast .buy").await;
    browser.until_text(status, |text| text == "待支付").await;
    browser.until_text(status, |text| text == "已取消").await;
    browser.click(".order .toggle-history").await;
    browser.until_text(".order .history", |text| text.contains("超时未支付")).await;
    assert!(shop.stop().success());
}

/// The id of the one order that is paid.
async fn paid_order(shop: &Shop) -> String {
    let sales = shop.client().await.get("/v1/sales", "").await.unwrap().json();
    for sale in sales["sales"].as_array().unwrap() {
        let path = format!("/admin/v1/sales/{}/orders", sale["id"].as_str().unwrap());
        let page = shop.client().await.get(&path, crate::shop::TOKEN).await.unwrap().json();
        let paid = page["orders"].as_array().unwrap().iter().find(|order| order["status"] == "paid");
        if let Some(order) = paid {
            return order["id"].as_str().unwrap().to_owned();
        }
    }
    panic!("no order is paid");
}
