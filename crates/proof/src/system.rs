//! The system under load, as seen from outside: its nodes, its administrator's routes, its ledger.

use std::fmt;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::ports::{Inspected, Ledger, OrderRow};
use stampede_core::{
    Clock as _, Epoch, Money, Order, OrderId, Sale, SaleId, SaleStatus, SystemClock, Timestamp, UserId, VoucherId,
    Window,
};
use stampede_testkit::{Client, Process, Reply};

use crate::check::{Evidence, GateView};
use crate::machine;

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("cannot start a node")]
    Start(#[source] std::io::Error),
    #[error("{what} failed")]
    Call { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{what} was answered with {status}: {body}")]
    Refused { what: String, status: u16, body: String },
    #[error("{0} was answered with something else than expected")]
    Strange(String),
    #[error("the ledger cannot be read")]
    Ledger(#[from] stampede_core::ports::LedgerError),
    #[error("there is no sale {0}")]
    NoSale(SaleId),
}

type Result<T> = std::result::Result<T, SystemError>;

/// A process of ours, which can be killed and started again at the same address.
pub struct Node {
    process: Process,
    address: SocketAddr,
    command: Box<dyn Fn(Option<SocketAddr>) -> Command + Send>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("pid", &self.process.pid()).field("address", &self.address).finish_non_exhaustive()
    }
}

/// How long a node may take to learn of another's change.
const SHOWN_WITHIN: Duration = Duration::from_secs(10);
/// How long a node may take to start.
const START_WITHIN: Duration = Duration::from_secs(60);

fn start(command: Command) -> Result<(Process, SocketAddr)> {
    let mut process = Process::start(command).map_err(SystemError::Start)?;
    let address = process.wait_for(START_WITHIN, |line| {
        let (_, address) = line.trim().strip_prefix("open")?.split_once("://")?;
        address.strip_suffix('/')?.parse().ok()
    });
    Ok((process, address.map_err(SystemError::Start)?))
}

impl Node {
    /// `command` makes the command that serves, on the address given or on any.
    pub fn start(command: impl Fn(Option<SocketAddr>) -> Command + Send + 'static) -> Result<Self> {
        let (process, address) = start(command(None))?;
        Ok(Self { process, address, command: Box::new(command) })
    }

    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// `kill -9`, then the same again at the same address.
    pub fn crash(&mut self) -> Result<()> {
        self.process.kill().map_err(SystemError::Start)?;
        self.process = start((self.command)(Some(self.address)))?.0;
        Ok(())
    }

    /// As an operator stops it.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal("TERM").map_err(SystemError::Start)?;
        let status = self.process.wait(Duration::from_secs(60)).map_err(SystemError::Start)?;
        if status.success() { Ok(()) } else { Err(SystemError::Start(std::io::Error::other(format!("{status}")))) }
    }
}

/// Buyers with sessions, by their number.
#[derive(Debug, Clone)]
pub struct Buyers {
    pub users: Vec<UserId>,
    pub tokens: Arc<Vec<String>>,
}

#[derive(Debug)]
pub struct System {
    /// Where buyers go.
    pub addresses: Vec<SocketAddr>,
    pub admin: SocketAddr,
    pub token: String,
    /// Empty if somebody else runs them.
    pub nodes: Vec<Node>,
    /// Without it the ledger is read through the administrator's routes.
    pub ledger: Option<Arc<dyn Ledger>>,
}

/// How many test buyers are logged in with one call, and how many orders are read with one.
const PAGE: usize = 10_000;

fn strange(what: &str) -> SystemError {
    SystemError::Strange(what.to_owned())
}

fn field<'a>(value: &'a Value, name: &str, what: &str) -> Result<&'a Value> {
    value.get(name).ok_or_else(|| strange(what))
}

fn text<T: std::str::FromStr>(value: &Value, name: &str, what: &str) -> Result<T> {
    field(value, name, what)?.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| strange(what))
}

fn number<T: TryFrom<i64>>(value: &Value, name: &str, what: &str) -> Result<T> {
    field(value, name, what)?.as_i64().and_then(|n| T::try_from(n).ok()).ok_or_else(|| strange(what))
}

fn parsed<T: serde::de::DeserializeOwned>(value: &Value, name: &str, what: &str) -> Result<T> {
    serde_json::from_value(field(value, name, what)?.clone()).map_err(|_| strange(what))
}

impl System {
    async fn call(&self, path: &str, body: Option<&Value>) -> Result<Reply> {
        let what = format!("{} {path}", if body.is_some() { "POST" } else { "GET" });
        let failed = |source| SystemError::Call { what: what.clone(), source };
        let mut client = Client::connect(self.admin).await.map_err(failed)?;
        let reply = match body {
            Some(body) => client.post(path, &self.token, body).await,
            None => client.get(path, &self.token).await,
        };
        let reply = reply.map_err(failed)?;
        if reply.status.is_success() {
            return Ok(reply);
        }
        let body = String::from_utf8_lossy(&reply.body).chars().take(300).collect();
        Err(SystemError::Refused { what, status: reply.status.as_u16(), body })
    }

    async fn made(&self, path: &str, body: &Value) -> Result<String> {
        let id = self.call(path, Some(body)).await?.text("id");
        if id.is_empty() { Err(strange(path)) } else { Ok(id) }
    }

    /// A shop to sell from.
    pub async fn make_shop(&self) -> Result<String> {
        self.made("/admin/v1/shops", &json!({ "type_id": "1", "name": "Load test" })).await
    }

    /// A sale that is on for the next day.
    pub async fn make_sale(&self, shop: &str, stock: usize) -> Result<SaleId> {
        let voucher = json!({
            "shop_id": shop, "kind": "flash_sale", "title": "Load test", "price_cents": 100, "worth_cents": 200,
        });
        let voucher = self.made("/admin/v1/vouchers", &voucher).await?;
        let now = SystemClock.now();
        // A little earlier, for a server whose clock is behind ours.
        let (begin, end) = (now.minus(Duration::from_secs(60)), now.plus(Duration::from_secs(24 * 3600)));
        let sale = json!({ "voucher_id": voucher, "stock": stock, "begin": begin, "end": end });
        let sale = self.made("/admin/v1/sales", &sale).await?.parse().map_err(|_| strange("a new sale"))?;
        self.shown_everywhere(sale, stock).await?;
        Ok(sale)
    }

    /// Logs so many test buyers in.
    pub async fn log_in(&self, count: usize) -> Result<Buyers> {
        let what = "a login of test buyers";
        let (mut users, mut tokens) = (Vec::with_capacity(count), Vec::with_capacity(count));
        while users.len() < count {
            let some = (count - users.len()).min(PAGE);
            let body = json!({ "first": users.len(), "count": some });
            let answer = self.call("/admin/v1/load-test/sessions", Some(&body)).await?.json();
            let sessions = field(&answer, "sessions", what)?.as_array().filter(|all| all.len() == some);
            for session in sessions.ok_or_else(|| strange(what))? {
                users.push(text(session, "user_id", what)?);
                tokens.push(text(session, "token", what)?);
            }
        }
        Ok(Buyers { users, tokens: Arc::new(tokens) })
    }

    /// Cancels a buyer's order. `false` if that is refused.
    pub async fn cancel(&self, order: OrderId, token: &str) -> Result<bool> {
        let what = format!("POST /v1/orders/{order}/cancel");
        let failed = |source| SystemError::Call { what: what.clone(), source };
        let address = self.addresses.first().copied().unwrap_or(self.admin);
        let mut client = Client::connect(address).await.map_err(failed)?;
        let reply = client.post(&format!("/v1/orders/{order}/cancel"), token, &Value::Null).await.map_err(failed)?;
        Ok(reply.status.is_success())
    }

    /// Waits until every node shows at least so many of the sale: each of them learns of the others' changes in its own time.
    pub async fn shown_everywhere(&self, sale: SaleId, remaining: usize) -> Result<()> {
        let what = format!("GET /v1/sales/{sale}");
        let failed = |source| SystemError::Call { what: what.clone(), source };
        for &address in &self.addresses {
            let deadline = Instant::now() + SHOWN_WITHIN;
            let mut client = Client::connect(address).await.map_err(failed)?;
            loop {
                let reply = client.get(&format!("/v1/sales/{sale}"), "").await.map_err(failed)?;
                let shown = reply.json()["remaining"].as_u64();
                if shown.is_some_and(|shown| shown >= remaining as u64) {
                    break;
                }
                if Instant::now() >= deadline {
                    return Err(strange(&format!("{what} at {address}")));
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        Ok(())
    }

    /// What the gate says of a sale, and how many orders wait for the ledger.
    pub async fn gate(&self, sale: SaleId) -> Result<(GateView, u64)> {
        let path = format!("/admin/v1/sales/{sale}/gate");
        let answer = self.call(&path, None).await?.json();
        let digest: String = text(&answer, "digest", &path)?;
        let digest = u64::from_str_radix(&digest, 16).map_err(|_| strange(&path))?;
        let view = GateView { cap: number(&answer, "cap", &path)?, marks: number(&answer, "marks", &path)?, digest };
        Ok((view, number(&answer, "waiting", &path)?))
    }

    /// All that is known of a sale. With several nodes each has a gate of its own in `solo`: the administrator's is asked.
    pub async fn evidence(&self, sale: SaleId) -> Result<Evidence> {
        let (gate, waiting) = self.gate(sale).await?;
        let ledger = match &self.ledger {
            Some(ledger) => ledger.inspect(sale).await?.ok_or(SystemError::NoSale(sale))?,
            None => self.inspect(sale).await?,
        };
        Ok(Evidence { ledger, from_database: self.ledger.is_some(), gate: Some(gate), waiting: Some(waiting) })
    }

    /// The ledger's side through the administrator's routes. Of several moments, so only at rest.
    async fn inspect(&self, id: SaleId) -> Result<Inspected> {
        let mut orders = Vec::new();
        let mut after = String::new();
        loop {
            let path = format!("/admin/v1/sales/{id}/orders?limit={PAGE}{after}");
            let page = self.call(&path, None).await?.json();
            for row in field(&page, "orders", &path)?.as_array().ok_or_else(|| strange(&path))? {
                orders.push(read_row(row, id, &path)?);
            }
            match field(&page, "next", &path)?.as_str() {
                Some(next) => after = format!("&after={next}"),
                None => break,
            }
        }
        let path = format!("/admin/v1/sales/{id}");
        let sale = self.call(&path, None).await?.json();
        let total: u32 = number(&sale, "total", &path)?;
        let price: i64 = number(&sale, "price_cents", &path)?;
        let money = |cents| Money::from_cents(cents).ok_or_else(|| strange(&path));
        let sale = Sale {
            id,
            voucher: text::<VoucherId>(&sale, "voucher_id", &path)?,
            title: String::new(),
            price: money(price)?,
            worth: money(number(&sale, "worth_cents", &path)?)?,
            status: parsed::<SaleStatus>(&sale, "status", &path)?,
            window: Window { begin: parsed(&sale, "begin", &path)?, end: parsed(&sale, "end", &path)? },
            total,
            cap: total,
            // Not told by this way: what is live is counted.
            sold: u32::try_from(orders.iter().filter(|row: &&OrderRow| row.live).count()).unwrap_or(u32::MAX),
            epoch: Epoch(number(&sale, "epoch", &path)?),
            ver: number(&sale, "ver", &path)?,
        };
        Ok(Inspected { sale, orders, quarantine: Vec::new(), owed: Vec::new() })
    }

    /// The ids of all sales, newest first.
    pub async fn sales(&self) -> Result<Vec<SaleId>> {
        let mut sales: Vec<SaleId> = Vec::new();
        loop {
            let before = sales.last().map_or_else(String::new, |last| format!("&before={last}"));
            let path = format!("/admin/v1/sales?limit=100{before}");
            let page = self.call(&path, None).await?.json();
            let page = field(&page, "sales", &path)?.as_array().ok_or_else(|| strange(&path))?.clone();
            for sale in &page {
                sales.push(text(sale, "id", &path)?);
            }
            if page.is_empty() {
                return Ok(sales);
            }
        }
    }

    /// The sizes of the batches so far: how many were at most so large, by rising size; the last is all.
    pub async fn batches(&self) -> Result<Vec<(f64, u64)>> {
        let reply = self.call("/metrics", None).await?;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let bucket = |line: &str| {
            let (bound, count) = line.strip_prefix("stampede_commit_batch_size_bucket{le=\"")?.split_once("\"} ")?;
            Some((bound.replace("+Inf", "inf").parse().ok()?, count.parse().ok()?))
        };
        Ok(text.lines().filter_map(bucket).collect())
    }

    /// The processor time that the nodes have used so far; `None` if they are not ours.
    pub fn cpu(&self) -> Option<Duration> {
        let all: Option<Vec<Duration>> = self.nodes.iter().map(|node| machine::cpu(node.process.pid())).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum())
    }

    /// The most memory that a node has held at once.
    pub fn peak_rss(&self) -> Option<u64> {
        self.nodes.iter().filter_map(|node| machine::peak_rss(node.process.pid())).max()
    }
}

fn read_row(row: &Value, sale: SaleId, what: &str) -> Result<OrderRow> {
    let order = Order {
        id: text(row, "id", what)?,
        sale,
        user: text(row, "user_id", what)?,
        status: parsed(row, "status", what)?,
        price: Money::from_cents(number(row, "price_cents", what)?).ok_or_else(|| strange(what))?,
        created_at: parsed::<Timestamp>(row, "created_at", what)?,
        updated_at: parsed::<Timestamp>(row, "updated_at", what)?,
    };
    let live = field(row, "live", what)?.as_bool().ok_or_else(|| strange(what))?;
    Ok(OrderRow { order, live, epoch: Epoch(number(row, "epoch", what)?), seq: number(row, "seq", what)? })
}
