//! The system under test, seen from outside: its nodes, its administration routes, its ledger.

use std::fmt;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stampede_core::ports::{Ledger, OrderRow, SaleRecords};
use stampede_core::{
    Clock as _, Epoch, Money, Order, OrderId, Payment, Sale, SaleId, SalePhase, SaleStatus, StepReason, SystemClock,
    Timestamp, UserId, VoucherId, Window,
};

use crate::check::{self, Backlog, Evidence, GateView, Line, NodeGate, Polling, Rules};
use crate::history::Attempt;
use crate::http::{Client, Reply};
use crate::machine;
use crate::process::Process;

#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    #[error("cannot start a node")]
    Start(#[source] std::io::Error),
    #[error("{what} failed")]
    Call { what: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{what} returned {status}: {body}")]
    Refused { what: String, status: u16, body: String },
    #[error("{0} returned an unexpected response")]
    Unexpected(String),
    #[error("the ledger cannot be read")]
    Ledger(#[from] stampede_core::ports::LedgerError),
    #[error("there is no sale {0}")]
    NoSale(SaleId),
    #[error("there is no node to ask")]
    NoNode,
    #[error("more than {MAX_QUARANTINED} orders are in quarantine; to check them all, read the database (--database)")]
    TooManyQuarantined,
}

type Result<T> = std::result::Result<T, SystemError>;

/// Builds the command of a node that serves on the given address, or on any free one.
type BuildCommand = Box<dyn Fn(Option<SocketAddr>) -> Command + Send>;

/// A node that this process started. It can be killed and started again at the same address.
pub struct Node {
    process: Process,
    address: SocketAddr,
    command: BuildCommand,
}

/// A process that records orders, to be started when everything is measured, so that it takes no part in that.
pub struct LateConsumer {
    command: BuildCommand,
    started: Option<(Process, SocketAddr)>,
}

impl LateConsumer {
    pub fn new(command: impl Fn(Option<SocketAddr>) -> Command + Send + 'static) -> Self {
        Self { command: Box::new(command), started: None }
    }

    fn start(&mut self) -> Result<()> {
        self.started = Some(start((self.command)(None))?);
        Ok(())
    }
}

impl fmt::Debug for LateConsumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateConsumer").field("started", &self.started.is_some()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("pid", &self.process.pid()).field("address", &self.address).finish_non_exhaustive()
    }
}

/// How long a node may take to see another node's change.
const PROPAGATION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a node may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

fn start(command: Command) -> Result<(Process, SocketAddr)> {
    let mut process = Process::start(command).map_err(SystemError::Start)?;
    let address = process.wait_for(START_TIMEOUT, |line| {
        let line = line.trim();
        let (_, address) = line.strip_prefix("open").or_else(|| line.strip_prefix("health"))?.split_once("://")?;
        address.split('/').next()?.parse().ok()
    });
    Ok((process, address.map_err(SystemError::Start)?))
}

impl Node {
    /// `command` builds the command that serves on the given address, or on any free one.
    pub fn start(command: impl Fn(Option<SocketAddr>) -> Command + Send + 'static) -> Result<Self> {
        let (process, address) = start(command(None))?;
        Ok(Self { process, address, command: Box::new(command) })
    }

    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends SIGKILL and starts the node again at the same address.
    pub fn kill_and_restart(&mut self) -> Result<()> {
        self.process.kill().map_err(SystemError::Start)?;
        self.process = start((self.command)(Some(self.address)))?.0;
        Ok(())
    }

    /// Stops the node gracefully, with SIGTERM.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal("TERM").map_err(SystemError::Start)?;
        let status = self.process.wait(Duration::from_secs(60)).map_err(SystemError::Start)?;
        if status.success() { Ok(()) } else { Err(SystemError::Start(std::io::Error::other(format!("{status}")))) }
    }
}

/// Buyers with sessions, by index.
#[derive(Debug, Clone)]
pub struct Buyers {
    pub users: Vec<UserId>,
    pub tokens: Arc<Vec<String>>,
}

#[derive(Debug)]
pub struct System {
    /// The addresses for buyers.
    pub addresses: Vec<SocketAddr>,
    /// The addresses for administrators, one per node whose gate is compared. The first one serves all other requests.
    pub admins: Vec<SocketAddr>,
    pub token: String,
    /// Empty if the system was already running.
    pub nodes: Vec<Node>,
    pub late_consumer: Option<LateConsumer>,
    /// `None`: the ledger is read through the administration routes.
    pub ledger: Option<Arc<dyn Ledger>>,
}

/// The number of test sessions created, and of orders read, per request.
const PAGE: usize = 10_000;
/// The maximum number of quarantined orders that are read through the administration routes.
const MAX_QUARANTINED: usize = 10_000;

/// A quarantined order and its sale.
type Quarantined = (SaleId, (UserId, OrderId));

fn unexpected(what: &str) -> SystemError {
    SystemError::Unexpected(what.to_owned())
}

fn field<'a>(value: &'a Value, name: &str, what: &str) -> Result<&'a Value> {
    value.get(name).ok_or_else(|| unexpected(what))
}

fn text<T: std::str::FromStr>(value: &Value, name: &str, what: &str) -> Result<T> {
    field(value, name, what)?.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| unexpected(what))
}

fn number<T: TryFrom<i64>>(value: &Value, name: &str, what: &str) -> Result<T> {
    field(value, name, what)?.as_i64().and_then(|n| T::try_from(n).ok()).ok_or_else(|| unexpected(what))
}

fn parsed<T: serde::de::DeserializeOwned>(value: &Value, name: &str, what: &str) -> Result<T> {
    serde_json::from_value(field(value, name, what)?.clone()).map_err(|_| unexpected(what))
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

    async fn create(&self, path: &str, body: &Value) -> Result<String> {
        let id = self.call(path, Some(body)).await?.text("id");
        if id.is_empty() { Err(unexpected(path)) } else { Ok(id) }
    }

    /// Creates a shop.
    pub async fn create_shop(&self) -> Result<String> {
        self.create("/admin/v1/shops", &json!({ "type_id": "1", "name": "Load test" })).await
    }

    /// Creates a sale that is open for the next day, and waits until every node shows it.
    pub async fn create_sale(&self, shop: &str, stock: usize) -> Result<SaleId> {
        let voucher = json!({
            "shop_id": shop, "kind": "flash_sale", "title": "Load test", "price_cents": 100, "worth_cents": 200,
        });
        let voucher = self.create("/admin/v1/vouchers", &voucher).await?;
        let now = SystemClock.now();
        // The begin is in the past, in case the server's clock is behind.
        let (begin, end) = (now.minus(Duration::from_secs(60)), now.plus(Duration::from_secs(24 * 3600)));
        let sale = json!({ "voucher_id": voucher, "stock": stock, "begin": begin, "end": end });
        let sale = self.create("/admin/v1/sales", &sale).await?.parse().map_err(|_| unexpected("a new sale"))?;
        self.wait_for_sale(sale, stock).await?;
        Ok(sale)
    }

    /// Creates sessions for this many test buyers.
    pub async fn log_in(&self, count: usize) -> Result<Buyers> {
        let what = "POST /admin/v1/load-test/sessions";
        let (mut users, mut tokens) = (Vec::with_capacity(count), Vec::with_capacity(count));
        while users.len() < count {
            let some = (count - users.len()).min(PAGE);
            let body = json!({ "first": users.len(), "count": some });
            let body = self.call("/admin/v1/load-test/sessions", Some(&body)).await?.json();
            let sessions = field(&body, "sessions", what)?.as_array().filter(|all| all.len() == some);
            for session in sessions.ok_or_else(|| unexpected(what))? {
                users.push(text(session, "user_id", what)?);
                tokens.push(text(session, "token", what)?);
            }
        }
        Ok(Buyers { users, tokens: Arc::new(tokens) })
    }

    /// Waits until every node shows the sale with at least this much remaining stock: nodes poll each other's changes.
    pub async fn wait_for_sale(&self, sale: SaleId, remaining: usize) -> Result<()> {
        let what = format!("GET /v1/sales/{sale}");
        let failed = |source| SystemError::Call { what: what.clone(), source };
        for &address in &self.addresses {
            let deadline = Instant::now() + PROPAGATION_TIMEOUT;
            let mut client = Client::connect(address).await.map_err(failed)?;
            loop {
                let reply = client.get(&format!("/v1/sales/{sale}"), "").await.map_err(failed)?;
                let shown = reply.json()["remaining"].as_u64();
                if shown.is_some_and(|shown| shown >= remaining as u64) {
                    break;
                }
                if Instant::now() >= deadline {
                    return Err(unexpected(&format!("{what} at {address}")));
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        Ok(())
    }

    /// Reads the state of a sale in the gate of a node.
    async fn gate(&self, node: SocketAddr, sale: SaleId) -> Result<NodeGate> {
        let path = format!("/admin/v1/sales/{sale}/gate");
        let body = match self.call_at(node, &path, None).await {
            Ok(reply) => reply.json(),
            Err(SystemError::Refused { status: 404, .. }) => {
                let (outbox, queue, is_queue_unreadable) = (None, None, false);
                return Ok(NodeGate {
                    node: node.to_string(),
                    view: None,
                    waiting: 0,
                    outbox,
                    queue,
                    is_queue_unreadable,
                });
            }
            Err(error) => return Err(error),
        };
        let digest: String = text(&body, "digest", &path)?;
        let digest = u64::from_str_radix(&digest, 16).map_err(|_| unexpected(&path))?;
        let (cap, marks) = (number(&body, "cap", &path)?, number(&body, "marks", &path)?);
        let view = Some(GateView { cap, marks, digest, owners: None });
        let waiting = number(&body, "waiting", &path)?;
        let (outbox, queue) = (field(&body, "outbox", &path)?.as_u64(), field(&body, "queue", &path)?.as_u64());
        let is_queue_unreadable = field(&body, "queue_error", &path)?.is_string();
        Ok(NodeGate { node: node.to_string(), view, waiting, outbox, queue, is_queue_unreadable })
    }

    /// Reads the marks of a gate. Each page is consistent, the pages together are not.
    async fn marks(&self, node: SocketAddr, sale: SaleId) -> Result<Vec<(UserId, OrderId)>> {
        let mut marks = Vec::new();
        let mut after = String::new();
        loop {
            let path = format!("/admin/v1/sales/{sale}/marks?limit=100000{after}");
            let page = self.call_at(node, &path, None).await?.json();
            for mark in field(&page, "marks", &path)?.as_array().ok_or_else(|| unexpected(&path))? {
                marks.push((text(mark, "user_id", &path)?, text(mark, "order_id", &path)?));
            }
            match field(&page, "next", &path)?.as_str() {
                Some(next) => after = format!("&after={next}"),
                None => return Ok(marks),
            }
        }
    }

    /// Reads the quarantined orders of all sales, unless the ledger is read from the database.
    async fn quarantine(&self) -> Result<Vec<Quarantined>> {
        let (mut all, mut before) = (Vec::new(), String::new());
        while self.ledger.is_none() {
            let path = format!("/admin/v1/quarantine?limit=100{before}");
            let page = self.call(&path, None).await?.json();
            for order in field(&page, "orders", &path)?.as_array().ok_or_else(|| unexpected(&path))? {
                all.push((text(order, "sale_id", &path)?, (text(order, "user_id", &path)?, text(order, "id", &path)?)));
            }
            match field(&page, "next", &path)?.as_str() {
                Some(_) if all.len() >= MAX_QUARANTINED => return Err(SystemError::TooManyQuarantined),
                Some(next) => before = format!("&before={next}"),
                None => break,
            }
        }
        Ok(all)
    }

    /// Reads the ledger's records of a sale and the gates of all nodes: in `solo`, every node has its own gate.
    pub async fn evidence(&self, sale: SaleId) -> Result<Evidence> {
        let quarantine = self.quarantine().await?;
        self.evidence_with(sale, &quarantine).await
    }

    async fn evidence_with(&self, sale: SaleId, quarantine: &[Quarantined]) -> Result<Evidence> {
        let mut gates = Vec::new();
        for &node in &self.admins {
            gates.push(self.gate(node, sale).await?);
        }
        let ledger = match &self.ledger {
            Some(ledger) => ledger.inspect(sale).await?.ok_or(SystemError::NoSale(sale))?,
            None => self.inspect(sale, quarantine).await?,
        };
        // All marks are transferred only if a digest differs.
        if gates.iter().filter_map(|gate| gate.view.as_ref()).any(|view| !view.matches(&ledger)) {
            for (&node, gate) in self.admins.iter().zip(&mut gates) {
                match (self.marks(node, sale).await, &mut gate.view) {
                    (Ok(marks), Some(view)) => view.owners = Some(marks),
                    // The gate has evicted the sale in the meantime.
                    (Err(SystemError::Refused { status: 404, .. }), view) => *view = None,
                    (Err(error), _) => return Err(error),
                    (Ok(_), None) => {}
                }
            }
        }
        let queue = gates.iter().filter_map(|gate| gate.queue).max();
        let backlog = Backlog {
            outbox: gates.iter().filter_map(|gate| gate.outbox).max(),
            queue,
            is_queue_unreadable: queue.is_none() && gates.iter().any(|gate| gate.is_queue_unreadable),
        };
        Ok(Evidence { ledger, from_database: self.ledger.is_some(), gates, backlog })
    }

    /// Reads the evidence of several sales, and the payments of no sale.
    async fn records_of(&self, sales: &[SaleId]) -> Result<(Vec<Evidence>, Vec<Payment>)> {
        let mut all = Vec::with_capacity(sales.len());
        let quarantine = self.quarantine().await?;
        for &sale in sales {
            all.push(self.evidence_with(sale, &quarantine).await?);
        }
        let stray = match &self.ledger {
            Some(ledger) => ledger.stray_payments().await?,
            None => Vec::new(),
        };
        Ok((all, stray))
    }

    /// Checks the invariants of these sales. A running system is polled, and only findings that persist count; a stopped one is read once.
    pub async fn check(
        &self,
        sales: &[SaleId],
        polling: Polling,
        rules: Rules,
        history: Option<&[Attempt]>,
    ) -> Result<(Vec<Evidence>, Vec<Line>)> {
        if self.admins.is_empty() {
            let (evidence, stray) = self.records_of(sales).await?;
            let lines = check::check(&evidence, &stray, history, rules);
            return Ok((evidence, lines));
        }
        let deadline = Instant::now() + polling.duration;
        let gather = async || loop {
            match self.records_of(sales).await {
                // For a moment a node cannot tell: its gate is being rebuilt, or a server does not answer.
                Err(SystemError::Refused { status: 503, .. }) if Instant::now() < deadline => {
                    tokio::time::sleep(polling.interval).await;
                }
                gathered => return gathered,
            }
        };
        check::poll(polling, rules, history, gather).await
    }

    /// Some live orders of a sale with their users.
    pub async fn some_orders(&self, sale: SaleId) -> Result<Vec<(UserId, OrderId)>> {
        let path = format!("/admin/v1/sales/{sale}/orders?limit={PAGE}");
        let page = self.call(&path, None).await?.json();
        let rows = field(&page, "orders", &path)?.as_array().ok_or_else(|| unexpected(&path))?.clone();
        let rows: Result<Vec<OrderRow>> = rows.iter().map(|row| read_row(row, sale, &path)).collect();
        Ok(rows?.into_iter().filter(|row| row.live).map(|row| (row.order.user, row.order.id)).collect())
    }

    /// Reads the ledger's records through the administration routes. The pages are consistent with each other only if nothing changes.
    async fn inspect(&self, id: SaleId, quarantine: &[Quarantined]) -> Result<SaleRecords> {
        let mut orders = Vec::new();
        let mut after = String::new();
        loop {
            let path = format!("/admin/v1/sales/{id}/orders?limit={PAGE}{after}");
            let page = self.call(&path, None).await?.json();
            for row in field(&page, "orders", &path)?.as_array().ok_or_else(|| unexpected(&path))? {
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
        let money = |cents| Money::from_cents(cents).ok_or_else(|| unexpected(&path));
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
            // The routes do not return this number, so the live orders are counted.
            sold: u32::try_from(orders.iter().filter(|row: &&OrderRow| row.live).count()).unwrap_or(u32::MAX),
            epoch: Epoch(number(&sale, "epoch", &path)?),
            // The routes do not return it either, and no check uses it.
            phase: SalePhase::Open,
            version: number(&sale, "ver", &path)?,
            released: 0,
            payment_deadline_ms: 0,
            buy_again: true,
        };
        let quarantine = quarantine.iter().filter(|(sale, _)| *sale == id).map(|(_, order)| *order).collect();
        let (events, payments) = (Vec::new(), Vec::new());
        let (pending_releases, stock_changes, edits) = (Vec::new(), Vec::new(), Vec::new());
        Ok(SaleRecords { sale, orders, events, payments, quarantine, pending_releases, stock_changes, edits })
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
            let page = field(&page, "sales", &path)?.as_array().ok_or_else(|| unexpected(&path))?.clone();
            for sale in &page {
                sales.push(text(sale, "id", &path)?);
            }
            if page.is_empty() {
                return Ok(sales);
            }
        }
    }

    async fn metrics(&self, node: SocketAddr) -> Result<String> {
        let reply = self.call_at(node, "/metrics", None).await?;
        Ok(String::from_utf8_lossy(&reply.body).into_owned())
    }

    /// The messages that the queue got from all nodes so far, and the orders in them. With Redis Streams a message is an entry of an
    /// outbox; with RabbitMQ attempts that were not confirmed count as well.
    pub(crate) async fn messages(&self) -> Result<(u64, u64)> {
        let (mut messages, mut orders) = (0, 0);
        for &node in &self.admins {
            let text = self.metrics(node).await?;
            let published = ["stampede_queue_published_total", "stampede_queue_unconfirmed_total"];
            messages += match published.map(|name| counter(&text, name)) {
                [Some(confirmed), Some(unconfirmed)] => confirmed + unconfirmed,
                _ => counter(&text, "stampede_outbox_entries_total").unwrap_or(0),
            };
            orders += counter(&text, "stampede_outbox_orders_total").unwrap_or(0);
        }
        Ok((messages, orders))
    }

    /// Orders of these sales that the ledger has, and that count against their stock.
    pub(crate) async fn recorded(&self, sales: &[SaleId]) -> Result<usize> {
        let Some(ledger) = &self.ledger else { return Err(unexpected("a system whose ledger cannot be read")) };
        let all = ledger.sales(None).await?;
        Ok(all.iter().filter(|sale| sales.contains(&sale.id)).map(|sale| sale.sold as usize).sum())
    }

    /// Orders of these sales that hold a mark in the gate.
    pub(crate) async fn marks_of(&self, sales: &[SaleId]) -> Result<usize> {
        let admin = self.admins.first().copied().ok_or(SystemError::NoNode)?;
        let mut marks = 0;
        for &sale in sales {
            marks += self.gate(admin, sale).await?.view.ok_or(SystemError::NoSale(sale))?.marks as usize;
        }
        Ok(marks)
    }

    /// The average number of orders in the transactions of the late consumer.
    pub(crate) async fn late_batch(&self) -> Result<f64> {
        let started = self.late_consumer.as_ref().and_then(|consumer| consumer.started.as_ref());
        let (_, address) = started.ok_or(SystemError::NoNode)?;
        let text = self.metrics(*address).await?;
        let of = |part: &str| counter(&text, &format!("stampede_commit_batch_size_{part}"));
        match (of("sum"), of("count")) {
            #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
            (Some(sum), Some(count)) if count > 0 => Ok(sum as f64 / count as f64),
            _ => Err(unexpected("the metrics of a consumer")),
        }
    }

    /// The histogram of batch sizes: cumulative counts by upper bound.
    pub async fn batches(&self) -> Result<Vec<(f64, u64)>> {
        let admin = self.admins.first().copied().ok_or(SystemError::NoNode)?;
        let text = self.metrics(admin).await?;
        let bucket = |line: &str| {
            let (bound, count) = line.strip_prefix("stampede_commit_batch_size_bucket{le=\"")?.split_once("\"} ")?;
            Some((bound.replace("+Inf", "inf").parse().ok()?, count.parse().ok()?))
        };
        Ok(text.lines().filter_map(bucket).collect())
    }

    /// Starts the consumer that took no part in what was measured, if there is one.
    pub(crate) fn start_late_consumer(&mut self) -> Result<()> {
        self.late_consumer.as_mut().map_or(Ok(()), LateConsumer::start)
    }

    /// The processor time of the nodes so far, or `None` if this process did not start them.
    pub fn cpu(&self) -> Option<Duration> {
        let all: Option<Vec<Duration>> = self.nodes.iter().map(|node| machine::cpu(node.process.pid())).collect();
        all.filter(|all| !all.is_empty()).map(|all| all.iter().sum())
    }

    /// The peak memory of the largest node.
    pub fn peak_rss(&self) -> Option<u64> {
        self.nodes.iter().filter_map(|node| machine::peak_rss(node.process.pid())).max()
    }
}

/// A counter of `/metrics` without labels.
fn counter(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn read_row(row: &Value, sale: SaleId, what: &str) -> Result<OrderRow> {
    let order = Order {
        id: text(row, "id", what)?,
        sale,
        user: text(row, "user_id", what)?,
        status: parsed(row, "status", what)?,
        price: Money::from_cents(number(row, "price_cents", what)?).ok_or_else(|| unexpected(what))?,
        created_at: parsed::<Timestamp>(row, "created_at", what)?,
        updated_at: parsed::<Timestamp>(row, "updated_at", what)?,
        pay_by: None,
    };
    let live = field(row, "live", what)?.as_bool().ok_or_else(|| unexpected(what))?;
    let reason = row.get("reason").filter(|reason| !reason.is_null());
    let reason = reason.map(|_| parsed::<StepReason>(row, "reason", what)).transpose()?;
    let (epoch, seq) = (Epoch(number(row, "epoch", what)?), number(row, "seq", what)?);
    Ok(OrderRow { order, live, reason, epoch, seq })
}
