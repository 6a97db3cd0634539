//! A private MariaDB: durable, empty, user `root` without a password.

use std::ffi::OsString;
use std::io::Result;
use std::path::Path;
use std::process::Command;

use super::{Server, change_owner, require_program, run};

const USER: &str = "mysql";
/// Creates the data directory.
const INSTALL: &str = "mariadb-install-db";
const DURABLE: &[&str] = &["--skip-log-bin"];

pub fn start() -> Result<Server> {
    start_with(DURABLE)
}

/// Like [`start`], with other options of `mariadbd`. Those of [`start`] switch the binary log off.
pub fn start_with(options: &'static [&'static str]) -> Result<Server> {
    launch(options, Vec::new())
}

/// Like [`start`], with more environment variables.
pub fn start_with_env(environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    launch(DURABLE, environment)
}

fn launch(options: &'static [&'static str], environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    let prepare = |directory: &Path| {
        require_program(Path::new(INSTALL))?;
        change_owner(USER, directory)?;
        let mut install = Command::new(INSTALL);
        // A starting server deletes the temporary tables that it finds in this directory, so servers must not share it.
        install.env("TMPDIR", directory);
        install.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
        install.arg(format!("--user={USER}")).arg(format!("--datadir={}", directory.join("data").display()));
        run(&mut install).map(drop)
    };
    let start = move |directory: &Path, port: u16| {
        let mut command = Command::new("mariadbd");
        command
            .envs(environment.iter().cloned())
            .env("TMPDIR", directory)
            .args(["--no-defaults", "--bind-address=127.0.0.1", "--max-connections=500"])
            .args(["--innodb-flush-log-at-trx-commit=1"])
            .args(options)
            .arg(format!("--user={USER}"))
            .arg(format!("--port={port}"))
            .arg(format!("--datadir={}", directory.join("data").display()))
            .arg(format!("--socket={}", directory.join("socket").display()))
            .arg(format!("--pid-file={}", directory.join("pid").display()));
        command
    };
    let ready = |port: u16| {
        let mut command = Command::new("mariadb-admin");
        command.args(client(port)).arg("ping");
        command
    };
    Server::launch("MariaDB", prepare, start, ready)
}

fn client(port: u16) -> [String; 4] {
    ["--no-defaults".into(), "--host=127.0.0.1".into(), format!("--port={port}"), "--user=root".into()]
}

/// Creates an empty database and returns its URL.
pub fn create_database(server: &Server, name: &str) -> Result<String> {
    let create = format!("CREATE DATABASE {name} CHARACTER SET utf8mb4");
    run(Command::new("mariadb").args(client(server.port())).args(["-e", &create]))?;
    Ok(url(server.port(), name))
}

pub fn url(port: u16, name: &str) -> String {
    format!("mysql://root@127.0.0.1:{port}/{name}")
}
