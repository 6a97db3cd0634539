//! `stampede quarantine`: lists, retries and discards orders that could not be recorded.
//!
//! It calls a running server, which releases the marks and writes the audit log.

use std::io::Write as _;

use clap::{Args, Subcommand};
use serde_json::Value;
use stampede_core::OrderId;

use crate::admin_client::AdminClient;

#[derive(Debug, Args)]
pub struct Quarantine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the orders in quarantine, newest first
    List(AdminClient),
    /// Show one order and the error of the database
    Show(OneOrder),
    /// Record the order, after the cause of the error is removed
    ///
    /// If the sale has no stock left, the order is rejected. If the database still rejects it, it stays in quarantine.
    Retry(OneOrder),
    /// Reject the order permanently and return its stock
    Discard(OneOrder),
}

#[derive(Debug, Args)]
struct OneOrder {
    /// The id of the order
    #[arg(value_name = "ORDER")]
    id: OrderId,

    #[command(flatten)]
    server: AdminClient,
}

impl Quarantine {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match &self.command {
                Command::List(server) => list(server).await,
                Command::Show(OneOrder { id, server }) => {
                    show(server, &server.get(&format!("/quarantine/{id}")).await?)
                }
                Command::Retry(OneOrder { id, server }) => {
                    show(server, &server.post(&format!("/quarantine/{id}/retry"), &Value::Null).await?)
                }
                Command::Discard(OneOrder { id, server }) => {
                    show(server, &server.post(&format!("/quarantine/{id}/discard"), &Value::Null).await?)
                }
            }
        })
    }
}

async fn list(server: &AdminClient) -> anyhow::Result<()> {
    let mut orders = Vec::new();
    let mut page = String::new();
    loop {
        let mut body = server.get(&format!("/quarantine?limit=100{page}")).await?;
        if let Value::Array(found) = body["orders"].take() {
            orders.extend(found);
        }
        match body["next"].as_str() {
            Some(next) => page = format!("&before={next}"),
            None => break,
        }
    }
    let mut out = std::io::stdout().lock();
    if server.json {
        writeln!(out, "{:#}", serde_json::json!({ "orders": orders }))?;
        return Ok(());
    }
    for order in &orders {
        let text = |member: &str| order[member].as_str().unwrap_or_default().to_owned();
        let (id, sale, user) = (text("id"), text("sale_id"), text("user_id"));
        writeln!(out, "{id}  sale {sale}  user {user}  {}  {}", text("quarantined_at"), text("error"))?;
    }
    writeln!(out, "{} order(s) in quarantine", orders.len())?;
    Ok(())
}

pub fn show(server: &AdminClient, body: &Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match body {
        Value::Object(members) if !server.json => {
            for (name, value) in members {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                writeln!(out, "{name:<15} {value}")?;
            }
        }
        body => writeln!(out, "{body:#}")?,
    }
    Ok(())
}
