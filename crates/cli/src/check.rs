//! `stampede check`: the invariants, on a live or a stopped system.

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use stampede_core::SaleId;
use stampede_core::ports::Ledger;
use stampede_ledger::Database;
use stampede_proof::check::{self, Evidence, Line};
use stampede_proof::history::{self, Attempt};
use stampede_proof::system::System;

use crate::admin_token::AdminTokenSource;
use crate::bench::address_of;
use crate::settings::{Flags, ServeFlags, Settings};

#[derive(Debug, Args)]
pub struct Check {
    #[command(flatten)]
    flags: Flags,

    /// The administrators' address of the running system, such as http://127.0.0.1:8080; without it the system is taken for
    /// stopped. Its ledger is read through its routes, or, with --database, --data-dir or --config, from the database itself
    #[arg(long, value_name = "URL")]
    target: Option<String>,

    #[command(flatten)]
    admin_token: AdminTokenSource,

    /// What was asked and heard, as `stampede bench --history` writes it
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,

    /// Only this sale; can be given several times [default: all; with a history those it is about]
    #[arg(long, value_name = "ID")]
    sale: Vec<SaleId>,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// A live system is looked at again for this long before a finding counts: orders are on their way all the time.
const PERSISTS: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(250);

impl Check {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let (sales, lines) = runtime.block_on(self.look())?;
        let failed = lines.iter().any(Line::failed);
        let mut out = std::io::stdout().lock();
        if self.json {
            let text = json!({ "sales": sales, "ok": !failed, "checks": lines });
            writeln!(out, "{}", serde_json::to_string_pretty(&text)?)?;
        } else {
            writeln!(out, "{sales} sale(s)")?;
            for line in &lines {
                writeln!(out, "{line}")?;
            }
        }
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    async fn look(&self) -> anyhow::Result<(usize, Vec<Line>)> {
        let history = self.history.as_ref().map(|path| {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            history::read(BufReader::new(file)).with_context(|| path.display().to_string())
        });
        let history = history.transpose()?;
        match &self.target {
            None => {
                let settings = Settings::load(&self.flags, &ServeFlags::default())?;
                let database = settings.database()?;
                if let Database::Sqlite(path) = &database
                    && !path.exists()
                {
                    bail!("there is no database at {}", path.display());
                }
                let ledger = stampede_ledger::open(&database).await.with_context(|| database.to_string())?.ledger;
                let all = ledger.sales(None).await?.into_iter().map(|sale| sale.id).collect();
                let sales = self.chosen(all, history.as_deref());
                let evidence = stopped(ledger.as_ref(), &sales).await?;
                ledger.close().await;
                Ok((sales.len(), check::check(&evidence, history.as_deref())))
            }
            Some(target) => {
                let admin = address_of(target)?;
                let token = self.admin_token.read()?;
                let ledger = match self.flags.names_database() {
                    true => {
                        let database = Settings::load(&self.flags, &ServeFlags::default())?.database()?;
                        Some(stampede_ledger::open(&database).await.with_context(|| database.to_string())?.ledger)
                    }
                    false => None,
                };
                let system = System { addresses: vec![admin], admin, token, nodes: Vec::new(), ledger };
                let sales = self.chosen(system.sales().await?, history.as_deref());
                let deadline = Instant::now() + PERSISTS;
                loop {
                    let mut evidence = Vec::new();
                    for &sale in &sales {
                        evidence.push(system.evidence(sale).await?);
                    }
                    let lines = check::check(&evidence, history.as_deref());
                    if !lines.iter().any(Line::failed) || Instant::now() >= deadline {
                        return Ok((sales.len(), lines));
                    }
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
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

async fn stopped(ledger: &dyn Ledger, sales: &[SaleId]) -> anyhow::Result<Vec<Evidence>> {
    let mut evidence = Vec::new();
    for &sale in sales {
        let ledger = ledger.inspect(sale).await?.with_context(|| format!("there is no sale {sale}"))?;
        evidence.push(Evidence { ledger, from_database: true, gate: None, waiting: None });
    }
    Ok(evidence)
}
