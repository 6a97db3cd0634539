//! A private MariaDB: durable, empty, user `root` without a password.

use std::ffi::OsString;
use std::io::Result;
use std::path::Path;
use std::process::Command;

use crate::fake_clock::FakeClock;
use crate::server::{Server, give_to, run};

const USER: &str = "mysql";
const DURABLE: &[&str] = &["--skip-log-bin"];

pub fn start() -> Result<Server> {
    start_with(DURABLE)
}

/// With more options of `mariadbd`; those of [`start`] are durable and without a binary log.
pub fn start_with(options: &'static [&'static str]) -> Result<Server> {
    launch(options, Vec::new())
}

/// One that lives by this clock.
pub fn start_by(clock: &FakeClock) -> Result<Server> {
    launch(DURABLE, clock.environment())
}

fn launch(options: &'static [&'static str], environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    let prepare = |folder: &Path| {
        give_to(USER, folder)?;
        let mut install = Command::new("mariadb-install-db");
        // At start a server deletes the temporary tables that it finds in this folder: those of other servers must not be there.
        install.env("TMPDIR", folder);
        install.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
        install.arg(format!("--user={USER}")).arg(format!("--datadir={}", folder.join("data").display()));
        run(&mut install).map(drop)
    };
    let start = move |folder: &Path, port: u16| {
        let mut command = Command::new("mariadbd");
        command
            .envs(environment.iter().cloned())
            .env("TMPDIR", folder)
            .args(["--no-defaults", "--bind-address=127.0.0.1", "--max-connections=500"])
            .args(["--innodb-flush-log-at-trx-commit=1"])
            .args(options)
            .arg(format!("--user={USER}"))
            .arg(format!("--port={port}"))
            .arg(format!("--datadir={}", folder.join("data").display()))
            .arg(format!("--socket={}", folder.join("socket").display()))
            .arg(format!("--pid-file={}", folder.join("pid").display()));
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

/// A new, empty database of this name; its URL for the server behind `port`.
pub fn create_database(server: &Server, name: &str) -> Result<String> {
    let create = format!("CREATE DATABASE {name} CHARACTER SET utf8mb4");
    run(Command::new("mariadb").args(client(server.port())).args(["-e", &create]))?;
    Ok(url(server.port(), name))
}

pub fn url(port: u16, name: &str) -> String {
    format!("mysql://root@127.0.0.1:{port}/{name}")
}
