//! A private PostgreSQL: durable, empty, user `postgres` without a password.

use std::ffi::OsString;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::fake_clock::FakeClock;
use crate::server::{Server, as_user, give_to, run};

const USER: &str = "postgres";

/// Debian keeps the server's programs out of the PATH.
fn program(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = versions.map(|entry| entry.path().join("bin").join(name)).collect();
    found.retain(|path| path.exists());
    found.sort();
    found.pop().unwrap_or_else(|| name.into())
}

pub fn start() -> Result<Server> {
    launch(Vec::new())
}

/// One that lives by this clock.
pub fn start_by(clock: &FakeClock) -> Result<Server> {
    launch(clock.environment())
}

fn launch(environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    let prepare = |folder: &Path| {
        give_to(USER, folder)?;
        let mut init = as_user(USER, &program("initdb"));
        init.args(["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "-D"]).arg(folder.join("data"));
        run(&mut init).map(drop)
    };
    let start = move |folder: &Path, port: u16| {
        // By `env`, so that the environment is the server's alone, not that of the program that changes the user.
        let mut command = as_user(USER, Path::new("env"));
        for (name, value) in &environment {
            let mut setting = OsString::from(format!("{name}="));
            setting.push(value);
            command.arg(setting);
        }
        command.arg(program("postgres"));
        command.arg("-D").arg(folder.join("data")).args(["-p", &port.to_string(), "-h", "127.0.0.1"]);
        command.arg("-k").arg(folder).args(["-c", "max_connections=300"]);
        command
    };
    let ready = |port: u16| {
        let mut command = Command::new(program("pg_isready"));
        command.args(["-h", "127.0.0.1", "-p", &port.to_string()]);
        command
    };
    Server::launch("PostgreSQL", prepare, start, ready)
}

/// A new, empty database of this name; its URL.
pub fn create_database(server: &Server, name: &str) -> Result<String> {
    let mut psql = Command::new(program("psql"));
    psql.args(["-q", "-h", "127.0.0.1", "-p", &server.port().to_string(), "-U", USER]);
    run(psql.args(["-c", &format!("CREATE DATABASE {name}")]))?;
    Ok(url(server.port(), name))
}

pub fn url(port: u16, name: &str) -> String {
    format!("postgres://{USER}@127.0.0.1:{port}/{name}")
}
