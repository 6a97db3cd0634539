//! `stampede rebuild`: loads the gate from the ledger again.

use std::io::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde_json::Value;

use crate::admin_client::AdminClient;

#[derive(Debug, Args)]
pub struct Rebuild {
    #[command(flatten)]
    server: AdminClient,
}

impl Rebuild {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let done = runtime.block_on(self.server.post("/gate/rebuild", &Value::Null))?;
        let closed = done["closed_sales"].as_u64().unwrap_or_default();
        let mut out = std::io::stdout().lock();
        if self.server.json {
            writeln!(out, "{done:#}")?;
        } else {
            writeln!(out, "the gate was rebuilt in {} ms", done["ms"])?;
            if closed > 0 {
                let why = "their orders cannot be recorded or read now, and the log of the node has the causes";
                writeln!(out, "{closed} sale(s) stay closed and are tried again: {why}")?;
            }
        }
        Ok(if closed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}
