//! Calls the administration of a running server.

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::Value;
use stampede_proof::http::Client;

use crate::admin_token::AdminTokenSource;
use crate::bench::address_of;

#[derive(Debug, Args)]
pub struct AdminClient {
    /// The administration address of the running system
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    target: String,

    #[command(flatten)]
    token: AdminTokenSource,

    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

impl AdminClient {
    /// Reads a path below `/admin/v1`.
    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.call(path, None).await
    }

    /// Posts to a path below `/admin/v1`.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        self.call(path, Some(body)).await
    }

    /// A refusal becomes an error with its reason.
    async fn call(&self, path: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (address, token) = (address_of(&self.target)?, self.token.read()?);
        let path = format!("/admin/v1{path}");
        let reply = async {
            let mut client = Client::connect(address).await?;
            match body {
                Some(body) => client.post(&path, &token, body).await,
                None => client.get(&path, &token).await,
            }
        };
        let unreachable = || format!("cannot reach {}; is the server running?", self.target);
        let reply = reply.await.map_err(anyhow::Error::from_boxed).with_context(unreachable)?;
        if !reply.status.is_success() {
            let (title, detail) = (reply.text("title"), reply.text("detail"));
            bail!("{} ({}){}{detail}", title, reply.status.as_u16(), if detail.is_empty() { "" } else { ": " });
        }
        Ok(reply.json())
    }
}
