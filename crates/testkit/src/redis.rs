//! Private Redis servers: standalone, durable, a master with a replica and a sentinel, a cluster; with TLS in [`tls`].

pub mod tls;

use std::ffi::OsString;
use std::io::{Error, Result};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use stampede_proof::process::pause;
use stampede_proof::servers::redis::{client, ready};
use stampede_proof::servers::{Server, run};

use crate::FakeClock;

pub use stampede_proof::servers::redis::{start_with, start_with_env, url};

/// The name of the master in the sentinel's configuration.
pub const MASTER: &str = "main";
/// How long replication or a cluster may take to form.
const FORMATION_TIMEOUT: Duration = Duration::from_secs(60);

const NOT_PERSISTENT: &[&str] = &["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"];

/// A server without persistence.
pub fn start() -> Result<Server> {
    start_with(NOT_PERSISTENT)
}

/// A server without persistence whose clock the test sets.
pub fn start_with_clock(clock: &FakeClock) -> Result<Server> {
    let mut environment = clock.environment();
    for (_, value) in environment.iter_mut().filter(|(name, _)| *name == "LD_PRELOAD") {
        // With the allocator of libc: jemalloc reads the clock before libfaketime can be initialized, which needs memory for that.
        value.push(":libc.so.6");
    }
    start_with_env(NOT_PERSISTENT, environment)
}

/// A server that syncs every write to disk before it replies.
pub fn start_durable() -> Result<Server> {
    start_with(&["--save", "", "--appendonly", "yes", "--appendfsync", "always"])
}

/// A master, its replica, and a sentinel that promotes the replica when the master has been down for a second.
#[derive(Debug)]
pub struct Replicated {
    pub master: Server,
    pub replica: Server,
    pub sentinel: Server,
}

pub fn start_replicated() -> Result<Replicated> {
    let master = start()?;
    let master_port = master.port().to_string();
    let replica = start_with(&["--save", "", "--appendonly", "no", "--replicaof", "127.0.0.1", &master_port])?;
    wait_until_replicating(&replica)?;
    let prepare = move |directory: &Path| {
        let config = format!(
            "sentinel monitor {MASTER} 127.0.0.1 {master_port} 1\n\
             sentinel down-after-milliseconds {MASTER} 1000\n\
             sentinel failover-timeout {MASTER} 3000\n"
        );
        std::fs::write(directory.join("sentinel.conf"), config)
    };
    let start = |directory: &Path, port: u16| {
        let mut command = Command::new("redis-server");
        command.arg(directory.join("sentinel.conf")).arg("--sentinel");
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string()]).arg("--dir").arg(directory);
        command
    };
    let sentinel = Server::launch("Redis sentinel", prepare, start, ready)?;
    wait_until("the sentinel has found the replica", || {
        let replicas = ask(sentinel.port(), &["sentinel", "replicas", MASTER])?;
        Ok(replicas.contains(&replica.port().to_string()))
    })?;
    Ok(Replicated { master, replica, sentinel })
}

/// Makes a server the replica of the one at this port, and waits until it has copied its data.
pub fn replicate(replica: &Server, master_port: u16) -> Result<()> {
    ask(replica.port(), &["replicaof", "127.0.0.1", &master_port.to_string()])?;
    wait_until_replicating(replica)
}

/// Makes a replica a master.
pub fn promote(replica: &Server) -> Result<()> {
    ask(replica.port(), &["replicaof", "no", "one"]).map(drop)
}

fn wait_until_replicating(replica: &Server) -> Result<()> {
    wait_until("the replica is connected", || {
        Ok(ask(replica.port(), &["info", "replication"])?.contains("master_link_status:up"))
    })
}

/// A cluster of three masters without replicas.
pub fn start_cluster() -> Result<[Server; 3]> {
    let nodes = [start_node()?, start_node()?, start_node()?];
    form_cluster(&nodes, 0, &[])?;
    Ok(nodes)
}

/// A cluster of three masters with one replica each.
pub fn start_replicated_cluster() -> Result<Vec<Server>> {
    let nodes = (0..6).map(|_| start_node()).collect::<Result<Vec<_>>>()?;
    form_cluster(&nodes, 1, &[])?;
    wait_until("every replica is connected", || {
        let mut up = 0;
        for node in &nodes {
            up += usize::from(ask(node.port(), &["info", "replication"])?.contains("master_link_status:up"));
        }
        Ok(up == 3)
    })?;
    Ok(nodes)
}

fn start_node() -> Result<Server> {
    let cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"];
    start_with(&[&cluster[..], &["--save", "", "--repl-diskless-sync-delay", "0"]].concat())
}

fn form_cluster(nodes: &[Server], replicas: usize, cli_options: &[OsString]) -> Result<()> {
    let mut create = Command::new("redis-cli");
    create.args(cli_options).args(["--cluster", "create"]).args(nodes.iter().map(|node| node.address().to_string()));
    run(create.args(["--cluster-replicas", &replicas.to_string(), "--cluster-yes"]))?;
    let known = format!("cluster_known_nodes:{}", nodes.len());
    for node in nodes {
        wait_until("the cluster has formed", || {
            let info = run(client(node.port()).args(cli_options).args(["cluster", "info"]))?;
            Ok(info.contains("cluster_state:ok") && info.contains(&known))
        })?;
    }
    Ok(())
}

/// Moves slots from one node of a cluster to another.
pub fn reshard(from: &Server, to: &Server, slots: usize) -> Result<()> {
    let id = |node: &Server| ask(node.port(), &["cluster", "myid"]).map(|id| id.trim().to_owned());
    let mut reshard = Command::new("redis-cli");
    reshard.args(["--cluster", "reshard", &from.address().to_string(), "--cluster-from", &id(from)?]);
    reshard.args(["--cluster-to", &id(to)?, "--cluster-slots", &slots.to_string(), "--cluster-yes"]);
    run(&mut reshard).map(drop)
}

/// Runs a command with `redis-cli` and returns its output.
pub fn ask(port: u16, command: &[&str]) -> Result<String> {
    run(client(port).args(command))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + FORMATION_TIMEOUT;
    while !condition()? {
        if Instant::now() > deadline {
            return Err(Error::other(format!("timed out: {what}")));
        }
        pause();
    }
    Ok(())
}
