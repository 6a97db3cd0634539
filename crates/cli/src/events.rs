//! `stampede events`: lists and retries events of orders that the receiver has rejected.
//!
//! It calls a running server, which writes the audit log.

use std::io::Write as _;

use clap::{Args, Subcommand};
use serde_json::json;
use stampede_core::OrderId;

use crate::admin_client::AdminClient;
use crate::quarantine::show;

#[derive(Debug, Args)]
pub struct Events {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the events that are set aside, oldest first, at most 100
    List(AdminClient),
    /// Send them again, after the cause is removed
    ///
    /// Those of an order arrive in sequence. One that the receiver still rejects is set aside again.
    Retry(Retry),
}

#[derive(Debug, Args)]
struct Retry {
    /// Only those of this order
    #[arg(value_name = "ORDER")]
    order: Option<OrderId>,

    #[command(flatten)]
    server: AdminClient,
}

impl Events {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match &self.command {
                Command::List(server) => list(server).await,
                Command::Retry(Retry { order, server }) => {
                    show(server, &server.post("/events/retry", &json!({ "order_id": order })).await?)
                }
            }
        })
    }
}

async fn list(server: &AdminClient) -> anyhow::Result<()> {
    let body = server.get("/events").await?;
    let mut out = std::io::stdout().lock();
    if server.json {
        writeln!(out, "{body:#}")?;
        return Ok(());
    }
    let events = body["failed"].as_array().map_or(&[][..], Vec::as_slice);
    for event in events {
        let text = |member: &str| event[member].as_str().unwrap_or_default();
        let (order, sale, from, to) = (text("order_id"), text("sale_id"), text("from"), text("to"));
        let (at, tries, error) = (text("at"), &event["tries"], text("error"));
        writeln!(out, "order {order}  sale {sale}  {from} to {to}  {at}  {tries} tries  {error}")?;
    }
    let waiting = body["waiting"].as_u64().unwrap_or_default();
    writeln!(out, "{} event(s) set aside; {waiting} entries of the outbox are not delivered", events.len())?;
    Ok(())
}
