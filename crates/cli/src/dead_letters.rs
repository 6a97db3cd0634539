//! `stampede dead-letters`: lists, shows, retries and discards messages of the queue that could not be read.
//!
//! It calls a running server, which writes the audit log.

use std::io::Write as _;

use clap::{Args, Subcommand};
use serde_json::Value;
use stampede_queue::DeadLetterId;

use crate::admin_client::AdminClient;
use crate::quarantine::show;

#[derive(Debug, Args)]
pub struct DeadLetters {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the dead letters, oldest first, at most 100
    List(AdminClient),
    /// Show one with its content in hexadecimal digits
    Show(OneLetter),
    /// Put it into the queue again
    ///
    /// For messages of a newer version, after this one was updated. If it still cannot be read, it comes back.
    Retry(OneLetter),
    /// Remove it
    Discard(OneLetter),
}

#[derive(Debug, Args)]
struct OneLetter {
    /// The id of the dead letter
    #[arg(value_name = "ID")]
    id: DeadLetterId,

    #[command(flatten)]
    server: AdminClient,
}

impl DeadLetters {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match &self.command {
                Command::List(server) => list(server).await,
                Command::Show(OneLetter { id, server }) => {
                    show(server, &server.get(&format!("/dead-letters/{id}")).await?)
                }
                Command::Retry(OneLetter { id, server }) => {
                    show(server, &server.post(&format!("/dead-letters/{id}/retry"), &Value::Null).await?)
                }
                Command::Discard(OneLetter { id, server }) => {
                    show(server, &server.post(&format!("/dead-letters/{id}/discard"), &Value::Null).await?)
                }
            }
        })
    }
}

async fn list(server: &AdminClient) -> anyhow::Result<()> {
    let body = server.get("/dead-letters?limit=100").await?;
    let mut out = std::io::stdout().lock();
    if server.json {
        writeln!(out, "{body:#}")?;
        return Ok(());
    }
    let letters = body["dead_letters"].as_array().map_or(&[][..], Vec::as_slice);
    for letter in letters {
        let text = |member: &str| letter[member].as_str().unwrap_or_default();
        writeln!(out, "{}  {} bytes  {}", text("id"), letter["bytes"], text("reason"))?;
    }
    writeln!(out, "{} dead letter(s)", letters.len())?;
    Ok(())
}
