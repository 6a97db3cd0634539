//! A private RabbitMQ: empty, with the virtual host `/` and the user `guest`, whose password is `guest`.
//!
//! An Erlang node registers its name with a port mapper, epmd, and would start one that every Erlang node of the machine shares and that
//! outlives it. Here each server has an epmd of its own, which ends with it.

use std::ffi::OsString;
use std::io::{ErrorKind, Read as _, Result, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{READY_TIMEOUT, Server, free_port, run};
use crate::process::{Process, pause};

/// Debian's package installs the programs here. Those of the same name on the PATH switch to the user `rabbitmq`.
const DEBIAN_PROGRAMS: &str = "/usr/lib/rabbitmq/bin";
/// The name of the node. Nodes of different servers do not meet, because each has its own epmd.
const NODE: &str = "stampede@localhost";
/// Contains the port of the server's epmd, for [`control`].
const EPMD_PORT_FILE: &str = "epmd-port";
/// What a client sends first: AMQP 0-9-1.
const AMQP_HEADER: &[u8] = b"AMQP\x00\x00\x09\x01";
/// The type of a frame with a method: the first byte that a ready server sends.
const METHOD_FRAME: u8 = 1;
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

pub fn start() -> Result<Server> {
    start_with(&[])
}

/// Like [`start`], with more lines for `rabbitmq.conf`.
pub fn start_with(config: &[String]) -> Result<Server> {
    let (epmd, epmd_port) = start_epmd()?;
    // Killed when the server is dropped.
    let epmd = Mutex::new(epmd);
    let config = ["loopback_users.guest = true".to_owned(), "log.file.level = info".to_owned()]
        .iter()
        .chain(config)
        .map(|line| format!("{line}\n"))
        .collect::<String>();
    let prepare = move |directory: &Path| {
        std::fs::create_dir(directory.join("home"))?;
        std::fs::write(directory.join("enabled_plugins"), "[].")?;
        std::fs::write(directory.join("rabbitmq.conf"), config)?;
        std::fs::write(directory.join(EPMD_PORT_FILE), epmd_port.to_string())
    };
    let start = move |directory: &Path, port: u16| {
        let _owned = &epmd;
        let mut command = Command::new(program("rabbitmq-server"));
        command.envs(environment(directory, epmd_port));
        command.env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1").env("RABBITMQ_NODE_PORT", port.to_string());
        // `free_port` has found this one free as well.
        command.env("RABBITMQ_DIST_PORT", (port + 10_000).to_string());
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "+S 2:2 -kernel inet_dist_use_interface {127,0,0,1}");
        // The script then replaces itself with the Erlang virtual machine, so that a signal reaches the server. Otherwise it remains, as
        // the parent of the server.
        command.env("RABBITMQ_ALLOW_INPUT", "1").arg("-noinput");
        command
    };
    Server::launch_with_probe("RabbitMQ", prepare, start, is_ready)
}

/// Runs `rabbitmqctl` and returns its output.
pub fn control(server: &Server, arguments: &[&str]) -> Result<String> {
    let port = std::fs::read_to_string(server.directory().join(EPMD_PORT_FILE))?;
    let epmd_port = port.parse().map_err(std::io::Error::other)?;
    let mut command = Command::new(program("rabbitmqctl"));
    command.envs(environment(server.directory(), epmd_port));
    command.env("RABBITMQ_CTL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}");
    run(command.arg("--quiet").args(arguments))
}

pub fn url(port: u16) -> String {
    format!("amqp://guest:guest@127.0.0.1:{port}")
}

fn program(name: &str) -> PathBuf {
    let path = Path::new(DEBIAN_PROGRAMS).join(name);
    if path.exists() { path } else { name.into() }
}

fn environment(directory: &Path, epmd_port: u16) -> Vec<(&'static str, OsString)> {
    let path = |name: &str| directory.join(name).into_os_string();
    vec![
        ("HOME", path("home")),
        ("RABBITMQ_NODENAME", NODE.into()),
        ("RABBITMQ_MNESIA_BASE", path("mnesia")),
        ("RABBITMQ_LOG_BASE", path("logs")),
        // The file whose content is part of the error if the server does not start.
        ("RABBITMQ_LOGS", path("log")),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins")),
        ("RABBITMQ_CONFIG_FILE", path("rabbitmq")),
        // No settings of an installation.
        ("RABBITMQ_CONF_ENV_FILE", path("none.conf")),
        ("RABBITMQ_PID_FILE", path("pid")),
        ("ERL_EPMD_PORT", epmd_port.to_string().into()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
    ]
}

/// Starts an epmd in the foreground and waits until it accepts connections.
fn start_epmd() -> Result<(Process, u16)> {
    let deadline = Instant::now() + READY_TIMEOUT;
    loop {
        let port = free_port()?;
        let mut command = Command::new("epmd");
        command.args(["-port", &port.to_string(), "-address", "127.0.0.1"]);
        // It reports connections without a request, such as those below.
        command.stderr(Stdio::null());
        let mut process = Process::start(command)?;
        loop {
            if process.try_wait()?.is_some() {
                // Another process has taken the port in the meantime.
                break;
            }
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Ok((process, port));
            }
            if Instant::now() > deadline {
                return Err(ErrorKind::TimedOut.into());
            }
            pause();
        }
        if Instant::now() > deadline {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}

/// A ready server replies to the header of the protocol with a frame. Before, it accepts no connection, or closes it.
fn is_ready(port: u16) -> Result<bool> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let Ok(mut stream) = TcpStream::connect_timeout(&address, PROBE_TIMEOUT) else { return Ok(false) };
    stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
    let mut first = [0];
    let replied = stream.write_all(AMQP_HEADER).and_then(|()| stream.read_exact(&mut first));
    Ok(replied.is_ok() && first == [METHOD_FRAME])
}
