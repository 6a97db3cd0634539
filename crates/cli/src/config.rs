//! `stampede config show` and `stampede config check`

use std::io::Write as _;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use stampede_ledger::Database;

use crate::redact::SecretUrl;
use crate::settings::{Flags, SenderKind, ServeFlags, Settings, merge};
use crate::webhook::check_url;

#[derive(Debug, Args)]
pub struct Config {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the effective settings, without passwords
    Show(ConfigArgs),
    /// Validate the settings; the exit code is 1 if they are invalid
    Check(ConfigArgs),
}

#[derive(Debug, Args)]
struct ConfigArgs {
    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    serve: ServeFlags,
}

impl Config {
    pub fn run(self) -> anyhow::Result<()> {
        let (Command::Show(given) | Command::Check(given)) = &self.command;
        // Everything that can be validated without opening a database, a token file or a port.
        let settings = Settings::load(&given.flags, &given.serve)?;
        settings.ids(&settings.tier(&settings.database()?)?)?;
        settings.admin_listen()?;
        settings.http.trusted_proxies()?;
        settings.http.cors_origins()?;
        settings.http.server(settings.http.certificate()?.as_ref())?;
        if settings.login.sender == SenderKind::Webhook {
            check_url(&settings.login.webhook_url, "login.webhook_url")?;
        }
        settings.alerts.phones()?;
        if !settings.alerts.webhook_url.expose().is_empty() {
            check_url(&settings.alerts.webhook_url, "alerts.webhook_url")?;
        }
        let mut out = std::io::stdout().lock();
        match self.command {
            Command::Check(_) => writeln!(out, "the settings are valid")?,
            Command::Show(given) => {
                let mut table: toml::Table = merge(&given.flags, &given.serve)?.try_deserialize()?;
                if let Some(toml::Value::String(url)) = table.get_mut("database")
                    && !url.is_empty()
                {
                    *url = Database::parse(url)?.to_string();
                }
                for (section, name) in [
                    ("login", "webhook_url"),
                    ("alerts", "webhook_url"),
                    ("events", "webhook_url"),
                    ("payments", "refund_url"),
                    ("redis", "url"),
                    ("rabbitmq", "url"),
                ] {
                    if let Some(toml::Value::String(url)) = table.get_mut(section).and_then(|table| table.get_mut(name))
                    {
                        *url = SecretUrl::from(url.as_str()).to_string();
                    }
                }
                write!(out, "{}", toml::to_string_pretty(&table).context("cannot print the settings")?)?;
            }
        }
        Ok(())
    }
}
