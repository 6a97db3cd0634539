//! A private Redis, without a password.

use std::ffi::OsString;
use std::io::Result;
use std::path::Path;
use std::process::Command;

use super::Server;

/// A server that writes an append-only file and syncs it once a second.
pub fn start() -> Result<Server> {
    start_with(&["--save", "", "--appendonly", "yes", "--appendfsync", "everysec"])
}

/// A server with other options.
pub fn start_with(options: &[&str]) -> Result<Server> {
    start_with_env(options, Vec::new())
}

/// Like [`start_with`], with more environment variables.
pub fn start_with_env(options: &[&str], environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    let options: Vec<String> = options.iter().map(|&arg| arg.to_owned()).collect();
    let start = move |directory: &Path, port: u16| {
        let mut command = Command::new("redis-server");
        command.envs(environment.iter().cloned());
        command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--dir"]).arg(directory).args(&options);
        command
    };
    Server::launch("Redis", |_| Ok(()), start, ready)
}

/// The command that succeeds once the server on this port is ready.
pub fn ready(port: u16) -> Command {
    let mut command = client(port);
    command.arg("ping");
    command
}

/// `redis-cli`; `-e`: it fails if the reply is an error.
pub fn client(port: u16) -> Command {
    let mut command = Command::new("redis-cli");
    command.args(["-e", "-h", "127.0.0.1", "-p", &port.to_string()]);
    command
}

pub fn url(port: u16) -> String {
    format!("redis://127.0.0.1:{port}/")
}
