//! A private PostgreSQL: durable, empty, user `postgres` without a password.

use std::ffi::OsString;
use std::io::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Server, change_owner, command_as_user, require_program, run};

const USER: &str = "postgres";

/// Debian installs the server's programs outside of the PATH.
fn program(name: &str) -> PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = versions.map(|entry| entry.path().join("bin").join(name)).collect();
    found.retain(|path| path.exists());
    found.sort();
    found.pop().unwrap_or_else(|| name.into())
}

pub fn start() -> Result<Server> {
    start_with_env(Vec::new())
}

/// Like [`start`], with more environment variables.
pub fn start_with_env(environment: Vec<(&'static str, OsString)>) -> Result<Server> {
    let prepare = |directory: &Path| {
        require_program(&program("initdb"))?;
        change_owner(USER, directory)?;
        let mut init = command_as_user(USER, &program("initdb"));
        init.args(["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "-D"])
            .arg(directory.join("data"));
        run(&mut init).map(drop)
    };
    let start = move |directory: &Path, port: u16| {
        // `env` sets the variables for the server alone and not for the program that changes the user.
        let mut command = command_as_user(USER, Path::new("env"));
        for (name, value) in &environment {
            let mut setting = OsString::from(format!("{name}="));
            setting.push(value);
            command.arg(setting);
        }
        command.arg(program("postgres"));
        command.arg("-D").arg(directory.join("data")).args(["-p", &port.to_string(), "-h", "127.0.0.1"]);
        command.arg("-k").arg(directory).args(["-c", "max_connections=300"]);
        command
    };
    let ready = |port: u16| {
        let mut command = Command::new(program("pg_isready"));
        command.args(["-h", "127.0.0.1", "-p", &port.to_string()]);
        command
    };
    Server::launch("PostgreSQL", prepare, start, ready)
}

/// Creates an empty database and returns its URL.
pub fn create_database(server: &Server, name: &str) -> Result<String> {
    let mut psql = Command::new(program("psql"));
    psql.args(["-q", "-h", "127.0.0.1", "-p", &server.port().to_string(), "-U", USER]);
    run(psql.args(["-c", &format!("CREATE DATABASE {name}")]))?;
    Ok(url(server.port(), name))
}

pub fn url(port: u16, name: &str) -> String {
    format!("postgres://{USER}@127.0.0.1:{port}/{name}")
}
