//! `stampede reconcile`: compares the gate with the ledger, repairs what differs, and shows what was repaired before.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use crate::admin_client::AdminClient;

#[derive(Debug, Args)]
pub struct Reconcile {
    /// Report what differs and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Show the last 100 lines of the reconcile log instead, newest first
    #[arg(long, conflicts_with = "dry_run")]
    log: bool,

    #[command(flatten)]
    server: AdminClient,
}

impl Reconcile {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let body = if self.log {
                self.server.get("/reconcile?limit=100").await?
            } else {
                self.server.post("/reconcile", &json!({ "dry_run": self.dry_run })).await?
            };
            let findings = body["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
            let mut out = std::io::stdout().lock();
            if self.server.json {
                writeln!(out, "{body:#}")?;
            } else {
                for finding in findings {
                    let text = |member: &str| finding[member].as_str().unwrap_or_default();
                    let order =
                        finding["order_id"].as_str().map(|order| format!("  order {order}")).unwrap_or_default();
                    writeln!(
                        out,
                        "{:<24}  {:<22}  {:<9}  sale {}{order}  {}",
                        text("at"),
                        text("finding"),
                        text("outcome"),
                        text("sale_id"),
                        text("detail"),
                    )?;
                }
                match (self.log, findings.len()) {
                    (true, lines) => writeln!(out, "{lines} line(s)")?,
                    (false, 0) => writeln!(out, "{} sale(s) compared, nothing differs", body["sales"])?,
                    (false, found) => writeln!(out, "{} sale(s) compared, {found} difference(s)", body["sales"])?,
                }
            }
            let is_open = |finding: &Value| finding["outcome"] != "repaired";
            Ok(if !self.log && findings.iter().any(is_open) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        })
    }
}
