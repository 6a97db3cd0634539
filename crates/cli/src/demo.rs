//! `stampede demo`: a whole system with demonstration data, to be tried with one command.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, bail};
use clap::Args;
use stampede_proof::system::Node;
use tokio::signal::unix::{SignalKind, signal};

use crate::private_servers::{NodeCommand, PrivateDatabase, start_rabbitmq, start_redis};
use crate::settings::{QueueKind, Tier};

#[derive(Debug, Args)]
pub struct Demo {
    /// The tier: solo; or shared, queued or shielded with a private PostgreSQL and Redis
    #[arg(long, value_enum, default_value_t = Tier::Shared)]
    tier: Tier,

    /// The queue of the tiers queued and shielded; for rabbitmq a private RabbitMQ is started
    #[arg(long, value_enum, default_value_t = QueueKind::RedisStream)]
    queue: QueueKind,

    /// Number of nodes; the tier solo has one [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=16))]
    nodes: Option<u16>,

    /// The port of the first node; the others have the next ones
    #[arg(long, default_value_t = 8080)]
    port: u16,
}

impl Demo {
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self.serve())
    }

    async fn serve(&self) -> anyhow::Result<()> {
        let count = match (self.tier, self.nodes) {
            (Tier::Solo, None | Some(1)) => 1,
            (Tier::Solo, Some(_)) => bail!("the tier solo has one node"),
            (Tier::Shared | Tier::Queued | Tier::Shielded, nodes) => nodes.unwrap_or(2),
        };
        // Installed first, so that an early signal stops what has been started.
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let directory = tempfile::Builder::new().prefix("stampede-demo-").tempdir()?;
        let command = |n: u16| NodeCommand::new(directory.path().join(format!("node-{n}")));
        let (mut servers, mut urls, mut amqp) = (Vec::new(), None, None);
        if self.queue == QueueKind::RabbitMq && !self.tier.has_queue() {
            bail!("--queue is for the tiers queued and shielded");
        }
        if self.tier.has_redis() {
            writeln!(std::io::stdout(), "starting PostgreSQL and Redis")?;
            let (database, database_url) = PrivateDatabase::Postgres.start()?;
            let (redis, redis_url) = start_redis()?;
            servers.extend([database, redis]);
            urls = Some((database_url, redis_url));
        }
        if self.queue == QueueKind::RabbitMq {
            writeln!(std::io::stdout(), "starting RabbitMQ")?;
            let (broker, url) = start_rabbitmq()?;
            servers.push(broker);
            amqp = Some(url);
        }
        let mut nodes = Vec::new();
        for n in 0..count {
            let mut command = command(n)?.flag("--demo").arg("--tier", self.tier.as_str());
            if let Some((database, redis)) = &urls {
                command = command.arg("--database", database).arg("--redis", redis);
            }
            if let Some(url) = &amqp {
                command = command.arg("--queue", self.queue.as_str()).arg("--amqp", url);
            }
            let port = self.port.checked_add(n).context("--port is too high")?;
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let command = move |_: Option<SocketAddr>| command.command(Some(address));
            nodes.push(Node::start(command).with_context(|| format!("the node on {address} did not start"))?);
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "Stampede {}, tier {}", env!("CARGO_PKG_VERSION"), self.tier.as_str())?;
        for node in &nodes {
            writeln!(out, "  open      http://{}/", node.address())?;
        }
        writeln!(out, "  log in with any number such as 13800138000; its code is shown on the page")?;
        writeln!(out, "  Ctrl-C stops everything")?;
        out.flush()?;
        drop(out);
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        writeln!(std::io::stdout(), "stopping")?;
        // The nodes first: they finish what is under way.
        for node in nodes {
            node.stop().context("a node did not stop cleanly")?;
        }
        drop(servers);
        Ok(())
    }
}
