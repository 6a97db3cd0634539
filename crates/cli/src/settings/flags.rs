//! The settings that have a flag.

use std::path::PathBuf;

use clap::Args;

/// The settings file, and the settings that have a flag.
#[derive(Debug, Args)]
pub struct Flags {
    /// A TOML file with settings
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// The ledger: sqlite:PATH, mysql://USER@HOST/NAME or postgres://USER@HOST/NAME [default: sqlite:DATA_DIR/stampede.db]
    #[arg(long, value_name = "URL")]
    pub(super) database: Option<String>,

    /// Directory of the embedded database and the admin token [default: data]
    #[arg(long, value_name = "DIR")]
    pub(super) data_dir: Option<PathBuf>,
}

impl Flags {
    /// Whether any flag selects a database.
    pub fn names_database(&self) -> bool {
        self.config.is_some() || self.database.is_some() || self.data_dir.is_some()
    }
}

/// Flags of `serve` only.
#[derive(Debug, Default, Args)]
pub struct ServeFlags {
    /// The tier: solo, one process; shared, several nodes with a gate in Redis; queued, the same with a queue in front of the
    /// database; or shielded, the same with nodes that refuse by themselves after the sell-out [default: solo]
    #[arg(long, value_name = "TIER")]
    pub(super) tier: Option<String>,

    /// The queue of the tiers queued and shielded: redis-stream, or rabbitmq, which needs --amqp [default: redis-stream]
    #[arg(long, value_name = "QUEUE")]
    pub(super) queue: Option<String>,

    /// The Redis server of the gate, for all tiers but solo: redis://USER:PASSWORD@HOST:PORT/DATABASE, or rediss:// for TLS
    #[arg(long, value_name = "URL")]
    pub(super) redis: Option<String>,

    /// The RabbitMQ of the queue: amqp://USER:PASSWORD@HOST:PORT/VHOST, or amqps:// for TLS
    #[arg(long, value_name = "URL")]
    pub(super) amqp: Option<String>,

    /// The address for buyers [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    pub(super) listen: Option<String>,

    /// A separate address for /admin and /metrics [default: the same as --listen]
    #[arg(long, value_name = "ADDR")]
    pub(super) admin_listen: Option<String>,
}
