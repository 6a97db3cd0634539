//! The system under load, as seen from outside: its nodes, its administrator's routes, its ledger.

use std::fmt;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::ports::{Ledger, OrderRow, SaleRecords};
use stampede_core::{
    Clock as _, Epoch, Money, Order, OrderId, Sale, SaleId, SaleStatus, SystemClock, Timestamp, UserId, VoucherId,
    Window,
};

use crate::check::{Evidence, GateView, NodeGate};
use crate::history::Heard;
use crate::http::{Client, Reply};
use crate::machine;
use crate::process::Process;

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
    #[error("there is no node to ask")]
    NoNode,
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
const SHOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a node may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

fn start(command: Command) -> Result<(Process, SocketAddr)> {
    let mut process = Process::start(command).map_err(SystemError::Start)?;
    let address = process.wait_for(START_TIMEOUT, |line| {
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
    /// Where administrators go, one for each node whose gate is compared; the first is asked for everything else.
    pub admins: Vec<SocketAddr>,
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
        let admin = self.admins.first().copied().ok_or(SystemError::NoNode)?;
        self.call_at(admin, path, body).await
    }

    async fn call_at(&self, admin: SocketAddr, path: &str, body: Option<&Value>) -> Result<Reply> {
        let what = format!("{} {path} at {admin}", if body.is_some() { "POST" } else { "GET" });
        let failed = |source| SystemError::Call { what: what.clone(), source };
        let mut client = Client::connect(admin).await.map_err(failed)?;
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

    /// Cancels a buyer's order at one of the nodes; how that was answered.
    pub async fn cancel(&self, order: OrderId, token: &str) -> Heard {
        let Some(&address) = self.addresses.first() else { return Heard::Unknown };
        let exchange = async {
            let mut client = Client::connect(address).await?;
            client.post(&format!("/v1/orders/{order}/cancel"), token, &Value::Null).await
        };
        match exchange.await {
            Ok(reply) if reply.status == 200 => Heard::Cancelled,
            Ok(reply) if reply.status == 503 => Heard::Unknown,
            Ok(reply) => Heard::refusal(&reply.text("code")).unwrap_or(Heard::Wrong),
            Err(_) => Heard::Unknown,
        }
    }

    /// Waits until every node shows at least so many of the sale: each of them learns of the others' changes in its own time.
    pub async fn shown_everywhere(&self, sale: SaleId, remaining: usize) -> Result<()> {
        let what = format!("GET /v1/sales/{sale}");
        let failed = |source| SystemError::Call { what: what.clone(), source };
        for &address in &self.addresses {
            let deadline = Instant::now() + SHOWN_TIMEOUT;
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

    /// What the gate of a node holds of a sale.
    async fn gate(&self, node: SocketAddr, sale: SaleId) -> Result<NodeGate> {
        let path = format!("/admin/v1/sales/{sale}/gate");
        let answer = match self.call_at(node, &path, None).await {
            Ok(reply) => reply.json(),
            Err(SystemError::Refused { status: 404, .. }) => {
                return Ok(NodeGate { node: node.to_string(), view: None, waiting: 0 });
            }
            Err(error) => return Err(error),
        };
        let digest: String = text(&answer, "digest", &path)?;
        let digest = u64::from_str_radix(&digest, 16).map_err(|_| strange(&path))?;
        let (cap, marks) = (number(&answer, "cap", &path)?, number(&answer, "marks", &path)?);
        let view = Some(GateView { cap, marks, digest, owners: None });
        Ok(NodeGate { node: node.to_string(), view, waiting: number(&answer, "waiting", &path)? })
    }

    /// The marks of a gate, one by one. A page is of one moment, all pages are of several.
    async fn marks(&self, node: SocketAddr, sale: SaleId) -> Result<Vec<(UserId, OrderId)>> {
        let mut marks = Vec::new();
        let mut after = String::new();
        loop {
            let path = format!("/admin/v1/sales/{sale}/marks?limit=100000{after}");
            let page = self.call_at(node, &path, None).await?.json();
            for mark in field(&page, "marks", &path)?.as_array().ok_or_else(|| strange(&path))? {
                marks.push((text(mark, "user_id", &path)?, text(mark, "order_id", &path)?));
            }
            match field(&page, "next", &path)?.as_str() {
                Some(next) => after = format!("&after={next}"),
                None => return Ok(marks),
            }
        }
    }

    /// All that is known of a sale. Each node has a gate of its own in `solo`, and every one is asked.
    pub async fn evidence(&self, sale: SaleId) -> Result<Evidence> {
        let mut gates = Vec::new();
        for &node in &self.admins {
            gates.push(self.gate(node, sale).await?);
        }
        let ledger = match &self.ledger {
            Some(ledger) => ledger.inspect(sale).await?.ok_or(SystemError::NoSale(sale))?,
            None => self.inspect(sale).await?,
        };
        // Only where something differs is it worth the transfer of all marks.
        if gates.iter().filter_map(|gate| gate.view.as_ref()).any(|view| !view.agrees_with(&ledger)) {
            for (&node, gate) in self.admins.iter().zip(&mut gates) {
                match (self.marks(node, sale).await, &mut gate.view) {
                    (Ok(marks), Some(view)) => view.owners = Some(marks),
                    // It was dropped from memory in between.
                    (Err(SystemError::Refused { status: 404, .. }), view) => *view = None,
                    (Err(error), _) => return Err(error),
                    (Ok(_), None) => {}
                }
            }
        }
        Ok(Evidence { ledger, from_database: self.ledger.is_some(), gates })
    }

    /// The same of several sales.
    pub async fn evidence_of(&self, sales: &[SaleId]) -> Result<Vec<Evidence>> {
        let mut all = Vec::with_capacity(sales.len());
        for &sale in sales {
            all.push(self.evidence(sale).await?);
        }
        Ok(all)
    }

    /// Some live orders of a sale, and whose they are.
    pub async fn some_orders(&self, sale: SaleId) -> Result<Vec<(UserId, OrderId)>> {
        let path = format!("/admin/v1/sales/{sale}/orders?limit={PAGE}");
        let page = self.call(&path, None).await?.json();
        let rows = field(&page, "orders", &path)?.as_array().ok_or_else(|| strange(&path))?.clone();
        let rows: Result<Vec<OrderRow>> = rows.iter().map(|row| read_row(row, sale, &path)).collect();
        Ok(rows?.into_iter().filter(|row| row.live).map(|row| (row.order.user, row.order.id)).collect())
    }

    /// The ledger's side through the administrator's routes. Of several moments, so only at rest.
    async fn inspect(&self, id: SaleId) -> Result<SaleRecords> {
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
            released: 0,
        };
        Ok(SaleRecords { sale, orders, quarantine: Vec::new(), pending_releases: Vec::new(), top_ups: Vec::new() })
    }

    /// The ids of all sales, newest first.
    pub async fn sales(&self) -> Result<Vec<SaleId>> {
        if let Some(ledger) = &self.ledger {
            return Ok(ledger.sales(None).await?.into_iter().map(|sale| sale.id).collect());
        }
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
