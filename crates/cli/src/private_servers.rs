//! Servers that `bench` and `demo` start for themselves, and the nodes on them.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, anyhow};
use stampede_proof::servers::{Server, mariadb, postgres, rabbitmq, redis};

/// The kinds of databases that can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrivateDatabase {
    MariaDb,
    Postgres,
}

impl PrivateDatabase {
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "mariadb" | "mysql" => Some(Self::MariaDb),
            "postgres" | "postgresql" => Some(Self::Postgres),
            _ => None,
        }
    }

    /// Starts a server, and returns it with the URL of an empty database.
    pub fn start(self) -> anyhow::Result<(Server, String)> {
        let (server, create): (_, fn(&Server, &str) -> std::io::Result<String>) = match self {
            Self::MariaDb => {
                (or_not_installed(mariadb::start(), "MariaDB", "mariadb-server")?, mariadb::create_database)
            }
            Self::Postgres => {
                (or_not_installed(postgres::start(), "PostgreSQL", "postgresql")?, postgres::create_database)
            }
        };
        let url = create(&server, "stampede")?;
        Ok((server, url))
    }
}

/// Starts a Redis, and returns it with its URL.
pub fn start_redis() -> anyhow::Result<(Server, String)> {
    let server = or_not_installed(redis::start(), "Redis", "redis-server")?;
    let url = redis::url(server.port());
    Ok((server, url))
}

/// Starts a RabbitMQ, and returns it with its URL.
pub fn start_rabbitmq() -> anyhow::Result<(Server, String)> {
    let server = or_not_installed(rabbitmq::start(), "RabbitMQ", "rabbitmq-server")?;
    let url = rabbitmq::url(server.port());
    Ok((server, url))
}

/// Names a server that is not installed, with the command that installs it.
fn or_not_installed(server: std::io::Result<Server>, name: &str, package: &str) -> anyhow::Result<Server> {
    server.map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            anyhow!("{name} is not installed; on Debian and Ubuntu: sudo apt-get install {package}")
        }
        _ => anyhow!(error).context(format!("cannot start a private {name}")),
    })
}

/// How to start a node of a system.
#[derive(Debug, Clone)]
pub struct NodeCommand {
    program: PathBuf,
    subcommand: &'static str,
    data_dir: PathBuf,
    args: Vec<OsString>,
    environment: Vec<(String, String)>,
}

impl NodeCommand {
    /// `serve` by this binary, with the node's own data directory.
    pub fn new(data_dir: PathBuf) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find the program's own file")?;
        Ok(Self { program, subcommand: "serve", data_dir, args: Vec::new(), environment: Vec::new() })
    }

    pub const fn subcommand(mut self, name: &'static str) -> Self {
        self.subcommand = name;
        self
    }

    pub fn arg(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.args.extend([name.into(), value.into()]);
        self
    }

    pub fn flag(mut self, name: &str) -> Self {
        self.args.push(name.into());
        self
    }

    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// The command that serves on this address, or on any free one.
    pub fn command(&self, listen: Option<SocketAddr>) -> Command {
        let mut command = Command::new(&self.program);
        let listen = listen.map_or_else(|| "127.0.0.1:0".to_owned(), |address| address.to_string());
        command.args([self.subcommand, "--listen", &listen, "--data-dir"]).arg(&self.data_dir).args(&self.args);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}
