//! `stampede rebuild`: loads the gate from the ledger again.

use std::io::Write as _;

use clap::Args;
use serde_json::Value;

use crate::admin_client::AdminClient;

#[derive(Debug, Args)]
pub struct Rebuild {
    #[command(flatten)]
    server: AdminClient,
}

impl Rebuild {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let done = runtime.block_on(self.server.post("/gate/rebuild", &Value::Null))?;
        let mut out = std::io::stdout().lock();
        if self.server.json {
            writeln!(out, "{done:#}")?;
        } else {
            writeln!(out, "the gate was rebuilt in {} ms", done["ms"])?;
        }
        Ok(())
    }
}
