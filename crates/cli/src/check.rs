//! `stampede check`: checks the invariants of a running or a stopped system.

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use stampede_core::SaleId;
use stampede_core::ports::Ledger;
use stampede_ledger::Database;
use stampede_proof::check::{Line, Polling, Rules};
use stampede_proof::history::{self, Attempt};
use stampede_proof::system::System;

use crate::admin_token::AdminTokenSource;
use crate::bench::address_of;
use crate::settings::{Flags, ServeFlags, Settings};

#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    flags: Flags,

    /// The administration address of a running node, such as http://127.0.0.1:8080; repeat it once per node to compare every gate.
    /// Without it the system is assumed to be stopped. The ledger is read through the first node, or, with --database, --data-dir
    /// or --config, from the database
    #[arg(long, value_name = "URL")]
    target: Vec<String>,

    #[command(flatten)]
    admin_token: AdminTokenSource,

    /// A recorded history, as written by `stampede bench --history`
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,

    /// Check only this sale; can be repeated [default: all sales; with a history, the sales in it]
    #[arg(long, value_name = "ID")]
    sale: Vec<SaleId>,

    /// The maximum difference between the clocks of nodes, database and history, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    max_clock_skew_ms: u64,

    /// How long after stock has come back a node may still answer that the sale is sold out, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    max_sold_out_delay_ms: u64,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A running system is polled: orders are being recorded all the time, and only findings that persist count.
const ONE_NODE: Polling = Polling { duration: Duration::from_secs(5), interval: Duration::from_millis(250) };
/// Nodes see each other's orders with a delay.
const SEVERAL_NODES: Polling = Polling { duration: Duration::from_secs(10), interval: Duration::from_millis(500) };

/// An invariant is violated.
const VIOLATED: u8 = 1;
/// Nothing could be checked, or the system or its database could not be read.
const NOT_CHECKABLE: u8 = 2;

impl Check {
    pub fn run(&self) -> ExitCode {
        let code = self.print().unwrap_or_else(|error| {
            eprintln!("stampede: {error:#}");
            NOT_CHECKABLE
        });
        ExitCode::from(code)
    }

    fn print(&self) -> anyhow::Result<u8> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let (sales, lines) = runtime.block_on(self.check())?;
        let (failed, checked) = (lines.iter().any(Line::failed), lines.iter().any(Line::checked));
        let mut out = std::io::stdout().lock();
        if self.json {
            let text = json!({ "sales": sales, "ok": checked && !failed, "checks": lines });
            writeln!(out, "{}", serde_json::to_string_pretty(&text)?)?;
        } else {
            writeln!(out, "{sales} sale(s)")?;
            for line in &lines {
                writeln!(out, "{line}")?;
            }
        }
        Ok(match (failed, checked) {
            (true, _) => VIOLATED,
            (false, true) => 0,
            (false, false) => NOT_CHECKABLE,
        })
    }

    async fn check(&self) -> anyhow::Result<(usize, Vec<Line>)> {
        let history = self.history.as_ref().map(|path| {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            history::read(BufReader::new(file)).with_context(|| path.display().to_string())
        });
        let mut history = history.transpose()?;
        if let Some(history) = history.as_mut().filter(|_| !self.sale.is_empty()) {
            history.retain(|attempt| self.sale.contains(&attempt.sale));
        }
        let rules = Rules {
            max_clock_skew: Duration::from_millis(self.max_clock_skew_ms),
            max_sold_out_delay: Duration::from_millis(self.max_sold_out_delay_ms),
            at_rest: false,
        };
        let system = self.system().await?;
        let sales = self.select_sales(system.sales().await?, history.as_deref());
        let polling = if system.admins.len() > 1 { SEVERAL_NODES } else { ONE_NODE };
        let (evidence, lines) = system.check(&sales, polling, rules, history.as_deref()).await?;
        Ok((evidence.len(), lines))
    }

    /// The system to check: the running nodes and the database, or the database alone.
    async fn system(&self) -> anyhow::Result<System> {
        let admins = self.target.iter().map(|target| address_of(target)).collect::<anyhow::Result<Vec<_>>>()?;
        let ledger = match admins.is_empty() || self.flags.names_database() {
            true => Some(self.ledger().await?),
            false => None,
        };
        let token = match admins.is_empty() {
            true => String::new(),
            false => self.admin_token.read()?,
        };
        Ok(System { addresses: Vec::new(), admins, token, nodes: Vec::new(), late_consumer: None, ledger })
    }

    async fn ledger(&self) -> anyhow::Result<Arc<dyn Ledger>> {
        let database = Settings::load(&self.flags, &ServeFlags::default())?.database()?;
        if let Database::Sqlite(path) = &database
            && !path.exists()
        {
            bail!("there is no database at {}", path.display());
        }
        stampede_ledger::open_read_only(&database).await.with_context(|| database.to_string())
    }

    fn select_sales(&self, all: Vec<SaleId>, history: Option<&[Attempt]>) -> Vec<SaleId> {
        let is_in_history = |sale: SaleId| history.is_some_and(|all| all.iter().any(|attempt| attempt.sale == sale));
        if !self.sale.is_empty() {
            // There is nothing to read of a sale that the ledger does not have. Attempts at it are judged by the history alone; without them
            // reading it fails.
            let is_readable = |sale: &SaleId| all.contains(sale) || !is_in_history(*sale);
            return self.sale.iter().copied().filter(is_readable).collect();
        }
        all.into_iter().filter(|sale| history.is_none() || is_in_history(*sale)).collect()
    }
}
