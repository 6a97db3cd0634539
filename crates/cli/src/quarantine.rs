//! `stampede quarantine`: lists, retries and discards orders that could not be recorded.
//!
//! It calls a running server, which releases the marks and writes the audit log.

use std::io::Write as _;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use serde_json::Value;
use stampede_core::OrderId;
use stampede_proof::http::Client;

use crate::admin_token::AdminTokenSource;
use crate::bench::address_of;

#[derive(Debug, Args)]
pub struct Quarantine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the orders in quarantine, newest first
    List(Access),
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
    access: Access,
}

#[derive(Debug, Args)]
struct Access {
    /// The administration address of the running system
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    target: String,

    #[command(flatten)]
    token: AdminTokenSource,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

impl Quarantine {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            match &self.command {
                Command::List(access) => access.list().await,
                Command::Show(OneOrder { id, access }) => access.show(&access.call(&format!("/{id}"), false).await?),
                Command::Retry(OneOrder { id, access }) => {
                    access.show(&access.call(&format!("/{id}/retry"), true).await?)
                }
                Command::Discard(OneOrder { id, access }) => {
                    access.show(&access.call(&format!("/{id}/discard"), true).await?)
                }
            }
        })
    }
}

impl Access {
    /// Calls a route below `/admin/v1/quarantine`. A refusal becomes an error with its reason.
    async fn call(&self, path: &str, change: bool) -> anyhow::Result<Value> {
        let (address, token) = (address_of(&self.target)?, self.token.read()?);
        let path = format!("/admin/v1/quarantine{path}");
        let reply = async {
            let mut client = Client::connect(address).await?;
            if change { client.post(&path, &token, &Value::Null).await } else { client.get(&path, &token).await }
        };
        let unreachable = || format!("cannot reach {}; is the server running?", self.target);
        let reply = reply.await.map_err(anyhow::Error::from_boxed).with_context(unreachable)?;
        if !reply.status.is_success() {
            let (title, detail) = (reply.text("title"), reply.text("detail"));
            bail!("{} ({}){}{detail}", title, reply.status.as_u16(), if detail.is_empty() { "" } else { ": " });
        }
        Ok(reply.json())
    }

    async fn list(&self) -> anyhow::Result<()> {
        let mut orders = Vec::new();
        let mut page = String::new();
        loop {
            let mut body = self.call(&format!("?limit=100{page}"), false).await?;
            if let Value::Array(found) = body["orders"].take() {
                orders.extend(found);
            }
            match body["next"].as_str() {
                Some(next) => page = format!("&before={next}"),
                None => break,
            }
        }
        let mut out = std::io::stdout().lock();
        if self.json {
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

    fn show(&self, body: &Value) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        match body {
            Value::Object(members) if !self.json => {
                for (name, value) in members {
                    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    writeln!(out, "{name:<15} {value}")?;
                }
            }
            body => writeln!(out, "{body:#}")?,
        }
        Ok(())
    }
}
