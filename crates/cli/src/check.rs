//! `stampede check`: the invariants, on a live or a stopped system.

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
use stampede_proof::check::{self, Line, Patience, Rules};
use stampede_proof::history::{self, Attempt};
use stampede_proof::system::System;

use crate::admin_token::AdminTokenSource;
use crate::bench::address_of;
use crate::settings::{Flags, ServeFlags, Settings};

#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    flags: Flags,

    /// The administrators' address of a running node, such as http://127.0.0.1:8080; can be given several times, once for each node,
    /// and every gate is compared. Without it the system is taken for stopped. The ledger is read through the first node, or, with
    /// --database, --data-dir or --config, from the database itself
    #[arg(long, value_name = "URL")]
    target: Vec<String>,

    #[command(flatten)]
    admin_token: AdminTokenSource,

    /// What was asked and answered, as `stampede bench --history` writes it
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,

    /// Only this sale; can be given several times [default: all; with a history those it is about]
    #[arg(long, value_name = "ID")]
    sale: Vec<SaleId>,

    /// How far the clocks of nodes, database and history may be apart, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    clocks_apart_ms: u64,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A live system is looked at again and again: orders are on their way all the time, and only what persists counts.
const LOOKS: Patience = Patience { lasting: Duration::from_secs(5), every: Duration::from_millis(250) };
/// Several nodes learn of each other's orders a little later.
const LOOKS_AT_NODES: Patience = Patience { lasting: Duration::from_secs(10), every: Duration::from_millis(500) };

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
        let (sales, lines) = runtime.block_on(self.look())?;
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

    async fn look(&self) -> anyhow::Result<(usize, Vec<Line>)> {
        let history = self.history.as_ref().map(|path| {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            history::read(BufReader::new(file)).with_context(|| path.display().to_string())
        });
        let mut history = history.transpose()?;
        if let Some(history) = history.as_mut().filter(|_| !self.sale.is_empty()) {
            history.retain(|attempt| self.sale.contains(&attempt.sale));
        }
        let rules = Rules { clocks_apart: Duration::from_millis(self.clocks_apart_ms), at_rest: false };
        let system = self.system().await?;
        let sales = self.chosen(system.sales().await?, history.as_deref());
        if system.admins.is_empty() {
            let evidence = system.evidence_of(&sales).await?;
            return Ok((sales.len(), check::check(&evidence, history.as_deref(), rules)));
        }
        let patience = if system.admins.len() > 1 { LOOKS_AT_NODES } else { LOOKS };
        let gather = async || system.evidence_of(&sales).await;
        let (evidence, lines) = check::look(patience, rules, history.as_deref(), gather).await?;
        Ok((evidence.len(), lines))
    }

    /// What is to be checked. Without nodes, its database alone.
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
        Ok(System { addresses: Vec::new(), admins, token, nodes: Vec::new(), ledger })
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

    fn chosen(&self, all: Vec<SaleId>, history: Option<&[Attempt]>) -> Vec<SaleId> {
        if !self.sale.is_empty() {
            return self.sale.clone();
        }
        match history {
            Some(history) => {
                all.into_iter().filter(|sale| history.iter().any(|attempt| attempt.sale == *sale)).collect()
            }
            None => all,
        }
    }
}
