//! Measures a tier: the benchmark of `stampede bench`, in whose storm the node is killed, and then one more sale in which statements and
//! commands are counted.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use sqlx::{AssertSqlSafe, MySqlPool};
use stampede_ledger::Database;
use stampede_proof::bench::{self, Options, Progress};
use stampede_proof::generator::{LoadGenerator, Plan, RequestTemplate, RunClock, Until};
use stampede_proof::history::Response;
use stampede_proof::report::{Report, Violation, ViolationKind};
use stampede_proof::servers::{mariadb, redis as redis_server};
use stampede_proof::system::{Node, System};
use tokio::sync::oneshot;

use super::{PrepareNode, TierNode};
use crate::error::{Error, Result};
use crate::measured::{Flaw, Measured};
use crate::meter::{executed_commands, executed_statements};
use crate::run::Lab;
use crate::servers::Redis;

/// For how long each kind of request is measured, and the storm lasts.
const SPAN: Duration = Duration::from_secs(1);
/// Connections of the benchmark, as `stampede bench` has by default.
const CONNECTIONS: usize = 256;
/// Buyers per connection of the storm, whose stock is half of the buyers: a wave of answers is a sixteenth of it, so that the node is killed while
/// it sells.
const STORM_BUYERS_PER_CONNECTION: usize = 32;
const MAX_STORM_CONNECTIONS: usize = 64;
/// Attempts of each buyer: in the storm, and in the sale that is counted.
const STORM_TRIES: usize = 3;
const COUNTED_TRIES: u32 = 2;
/// Connections in the sale that is counted: as many as the other versions have requests under way.
const COUNTED_CONNECTIONS: usize = 64;
/// How long the orders of that sale may take to be recorded.
const RECORD_TIMEOUT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// The names of figures.
pub const LOST: &str = "confirmed orders that do not exist after the node was killed";
pub const BEFORE_KILL: &str = "orders confirmed before the node was killed";
pub const AFTER_KILL: &str = "orders requested and confirmed after the node was killed";

/// Everything that the thread of a measurement needs.
struct Tier {
    node: TierNode,
    prepare: PrepareNode,
    /// The name of the database.
    name: String,
    sql: MySqlPool,
    redis: Option<Redis>,
    options: Options,
    /// Of the sale that is counted.
    stock: usize,
}

/// Starts a node of the tier, measures it, and stops it. While it is measured it is killed once, with SIGKILL, and started again.
///
/// # Errors
/// If it does not start, or answers something unexpected. What it does wrong is in the result.
pub async fn measure(lab: &Lab, tier: &'static str) -> Result<Measured> {
    let prepare = lab.options.prepare_node.ok_or_else(|| failed("only the program `stampede` can start a node"))?;
    let (sql, redis) = (lab.servers.mariadb()?, (tier != "solo").then(|| lab.servers.redis().cloned()).transpose()?);
    let name = lab.next_name();
    let create = format!("CREATE DATABASE {name} CHARACTER SET utf8mb4");
    sqlx::query(AssertSqlSafe(create)).execute(&sql.admin).await?;
    if let Some(redis) = &redis {
        redis::cmd("FLUSHALL").exec_async(&mut redis.admin.clone()).await?;
    }
    let node = TierNode {
        tier,
        // Below the directory of a server, which is removed even if this process is killed.
        data_dir: sql.server.directory().join(&name),
        token: format!("{:032x}", rand::random::<u128>()),
        database: mariadb::url(sql.server.port(), &name),
        redis: redis.as_ref().map(|redis| redis_server::url(redis.server.port())),
    };
    let buyers = count(lab.options.buyers)?;
    let options = Options {
        buyers,
        stock: buyers / 2,
        tries: STORM_TRIES,
        connections: CONNECTIONS,
        rate: None,
        seed: lab.seed,
        measure: SPAN,
        storm: SPAN,
        storm_connections: Some((buyers / STORM_BUYERS_PER_CONNECTION).clamp(1, MAX_STORM_CONNECTIONS)),
        kill: true,
        drain: false,
    };
    let stock = count(lab.options.stock)?;
    let tier = Tier { node, prepare, name, sql: sql.admin.clone(), redis, options, stock };
    // The benchmark does not move between threads, so it has one of its own. It ends if this future is dropped.
    let (alive, dropped) = oneshot::channel::<()>();
    let server = sql.server.clone();
    let thread = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let measured = runtime.block_on(async {
            tokio::select! {
                measured = tier.run() => measured,
                _ = dropped => Err(failed("interrupted")),
            }
        });
        // Its directory is removed with it, and the node, which writes below it, has ended.
        drop(server);
        measured
    });
    let measured = thread.await.map_err(|error| failed(&error.to_string()))?;
    drop(alive);
    measured
}

fn failed(why: &str) -> Error {
    Error::Failed(why.to_owned())
}

fn count(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|error| failed(&error.to_string()))
}

struct NoProgress;

impl Progress for NoProgress {
    fn phase(&self, _: &str) {}
}

impl Tier {
    async fn run(&self) -> Result<Measured> {
        let command = (self.prepare)(&self.node)?;
        let node = Node::start(command)?;
        let database = Database::parse(&self.node.database).map_err(|error| failed(&error.to_string()))?;
        let ledger = stampede_ledger::open_read_only(&database).await.map_err(|error| failed(&error.to_string()))?;
        let mut system = System {
            addresses: vec![node.address()],
            admins: vec![node.address()],
            token: self.node.token.clone(),
            nodes: vec![node],
            late_consumer: None,
            ledger: Some(ledger),
        };
        let clock = RunClock::new();
        let (report, _) = bench::run(&mut system, self.options, &clock, &NoProgress).await?;
        let mut measured = figures(&report)?;
        self.count_one_sale(&system, &mut measured).await?;
        if let Some(ledger) = system.ledger.take() {
            ledger.close().await;
        }
        for node in system.nodes.drain(..) {
            node.stop()?;
        }
        Ok(measured)
    }

    /// One sale, with the load of the other versions and without cancellations.
    #[expect(clippy::cast_precision_loss, reason = "counts of one run")]
    async fn count_one_sale(&self, system: &System, measured: &mut Measured) -> Result<()> {
        let buyers = system.log_in(self.options.buyers).await?;
        let shop = system.create_shop().await?;
        let sale = system.create_sale(&shop, self.stock).await?;
        let generator = LoadGenerator::connect(&system.addresses, COUNTED_CONNECTIONS, 1, &RunClock::new()).await?;
        let each = u32::try_from(self.options.buyers).map_err(|error| failed(&error.to_string()))?;
        let mut requests: Vec<u32> = (0..COUNTED_TRIES).flat_map(|_| 0..each).collect();
        requests.shuffle(&mut StdRng::seed_from_u64(self.options.seed));
        let request = RequestTemplate { path: format!("/v1/sales/{sale}/orders"), tokens: buyers.tokens.clone() };
        let plan = Plan { request, buyers: requests, until: Until::Once, rate: None };

        let before = self.counters().await?;
        let outcome = generator.run(plan).await;
        let confirmed: HashSet<_> = outcome.samples.iter().filter_map(|sample| sample.order).collect();
        let own = self.wait_until_recorded(&sale.to_string(), confirmed.len()).await?;
        let after = self.counters().await?;
        let refused =
            |sample: &&_| matches!(sample, Response::TooManyRequests | Response::Wrong | Response::Unauthorized);
        if let Some(response) = outcome.samples.iter().map(|sample| &sample.response).find(refused) {
            return Err(Error::Failed(format!("a buyer was answered {}", response.as_str())));
        }
        let per_request = |after: u64, before: u64, own: u64| {
            after.saturating_sub(before).saturating_sub(own) as f64 / outcome.samples.len() as f64
        };
        // The first reading of the counter is a statement too.
        measured.sql_per_request = Some(per_request(after.0, before.0, own.0 + 1));
        measured.redis_per_request = Some(per_request(after.1, before.1, own.1));
        // A tier without Redis sends nothing. The calls of the others are not counted: their own client sends them.
        measured.redis_calls_per_request = self.redis.is_none().then_some(0.0);
        Ok(())
    }

    /// The statements and the commands so far.
    async fn counters(&self) -> Result<(u64, u64)> {
        let commands = match &self.redis {
            Some(redis) => executed_commands(redis).await?,
            None => 0,
        };
        Ok((executed_statements(&self.sql).await?, commands))
    }

    /// Waits until this many orders are recorded and no outbox has an entry. Returns the statements and commands that this has taken.
    async fn wait_until_recorded(&self, sale: &str, orders: usize) -> Result<(u64, u64)> {
        let (deadline, mut statements, mut commands) = (Instant::now() + RECORD_TIMEOUT, 0, 0);
        let recorded = format!("SELECT COUNT(*) FROM {}.orders WHERE sale_id = {sale} AND live = 1", self.name);
        loop {
            let (rows,): (i64,) = sqlx::query_as(AssertSqlSafe(recorded.clone())).fetch_one(&self.sql).await?;
            statements += 1;
            let mut waiting = 0;
            if let Some(redis) = &self.redis {
                let mut redis = redis.admin.clone();
                let outboxes: Vec<String> = redis::cmd("KEYS").arg("*:out").query_async(&mut redis).await?;
                for outbox in &outboxes {
                    waiting += redis::cmd("XLEN").arg(outbox).query_async::<u64>(&mut redis).await?;
                }
                commands += 1 + outboxes.len() as u64;
            }
            if rows.unsigned_abs() >= orders as u64 && waiting == 0 {
                return Ok((statements, commands));
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut("all orders are recorded"));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

/// The figures and violations of the benchmark.
#[expect(clippy::cast_precision_loss, reason = "counts of one run")]
fn figures(report: &Report) -> Result<Measured> {
    let mut measured = Measured {
        orders_per_s: Some(report.orders.per_s),
        p99_ms: Some(report.latency_ms.order.p99),
        requests: report.orders.count as u64,
        ..Measured::default()
    };
    measured.figures.push(("refusals per second", report.refusals.per_s));
    let storm = &report.storm;
    let (Some(before @ 1..), Some(after @ 1..)) = (storm.before_kill, storm.after_kill) else {
        let orders = format!("{:?} orders before and {:?} after it", storm.before_kill, storm.after_kill);
        return Err(Error::Failed(format!("the node was not killed while it sold: {orders}")));
    };
    measured.killed();
    for (flaw, found) in [
        (Flaw::Oversold, storm.oversold),
        (Flaw::Undersold, storm.undersold),
        (Flaw::Duplicated, storm.duplicated),
        (Flaw::Lost, storm.lost),
    ] {
        let seen = |count| format!("{count} {} in the storm, in which the node was killed", flaw.name());
        measured.count(flaw, found as u64, seen);
    }
    measured.figures.extend([(LOST, storm.lost as f64), (BEFORE_KILL, before as f64), (AFTER_KILL, after as f64)]);
    add_violations(&mut measured, &report.violations);
    Ok(measured)
}

/// Notes the violations, those of one flaw together, unless the storm has shown that flaw.
fn add_violations(measured: &mut Measured, violations: &[Violation]) {
    for (kind, flaw) in [
        (ViolationKind::Oversold, Flaw::Oversold),
        (ViolationKind::Undersold, Flaw::Undersold),
        (ViolationKind::Duplicated, Flaw::Duplicated),
        (ViolationKind::Lost, Flaw::Lost),
        (ViolationKind::Other, Flaw::Inconsistent),
    ] {
        let of_kind = violations.iter().filter(|violation| violation.kind == kind);
        let texts: Vec<&str> = of_kind.map(|violation| violation.text.as_str()).collect();
        if !texts.is_empty() && !measured.has(flaw) {
            measured.flaws.push((flaw, format!("violations: {}", texts.join("; "))));
        }
    }
}

#[cfg(test)]
mod tests {
    use stampede_proof::check::{Line, Verdict};

    use super::*;

    #[test]
    fn violations_count_as_the_flaw_that_they_are() {
        let flaws = |violations: &[Violation]| {
            let mut measured = Measured::default();
            measured.count(Flaw::Duplicated, 2, |count| format!("{count} in the storm"));
            add_violations(&mut measured, violations);
            measured.flaws.iter().map(|(flaw, seen)| format!("{}: {seen}", flaw.name())).collect::<Vec<_>>()
        };
        let storm = "duplicated: 2 in the storm";
        assert_eq!(flaws(&[]), [storm]);
        for (invariant, flaw) in [(1, "inconsistent"), (2, "oversold"), (4, "lost"), (9, "inconsistent")] {
            let verdict = Verdict::Failed { findings: vec!["x".to_owned()] };
            let line = Line { invariant, description: "y", verdict };
            assert_eq!(flaws(&[Violation::from(&line)]), [storm, &format!("{flaw}: violations: {line}")]);
        }
        let [undersold, other, more, seen] = [
            (ViolationKind::Undersold, "a"),
            (ViolationKind::Other, "b"),
            (ViolationKind::Other, "c"),
            (ViolationKind::Duplicated, "d"),
        ]
        .map(|(kind, text)| Violation::new(kind, text.to_owned()));
        let found = flaws(&[other, undersold, more, seen]);
        assert_eq!(found, [storm, "undersold: violations: a", "inconsistent: violations: b; c"]);
    }
}
