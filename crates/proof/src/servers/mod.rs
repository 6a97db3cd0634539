//! Private temporary servers, each on a free port and with its own data directory.
//!
//! - [`mariadb`], [`postgres`], [`redis`]: the servers that `stampede bench` and `stampede demo` can start
//! - [`rabbitmq`]: a message broker, for tests
//! - [`Server`]: what they share: starting until the server is ready, killing, restarting on the same data

pub mod mariadb;
pub mod postgres;
pub mod rabbitmq;
pub mod redis;

use std::io::{Error, ErrorKind, Result};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tempfile::TempDir;

use crate::process::{Process, pause};

/// How long a server may take to become ready, or to stop.
const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How many ports a new server tries: another process can take a free port before the server binds it.
const PORTS_TRIED: u32 = 5;

/// Builds the command that starts a server with this data directory on this port.
type Start = dyn Fn(&Path, u16) -> Command + Send + Sync;
/// Says whether the server on this port is ready.
type Ready = dyn Fn(u16) -> Result<bool> + Send + Sync;

/// A running server. It is killed when it is dropped, and also when this process dies.
pub struct Server {
    kind: &'static str,
    port: u16,
    start: Box<Start>,
    ready: Box<Ready>,
    process: Mutex<Option<Process>>,
    directory: TempDir,
}

impl Server {
    /// Starts a server in a new directory that `prepare` has filled. The command that `ready` builds succeeds once the server is ready.
    pub fn launch(
        kind: &'static str,
        prepare: impl FnOnce(&Path) -> Result<()>,
        start: impl Fn(&Path, u16) -> Command + Send + Sync + 'static,
        ready: impl Fn(u16) -> Command + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::launch_with_probe(kind, prepare, start, move |port| {
            Ok(without_stdio(&mut ready(port)).status()?.success())
        })
    }

    /// Like [`launch`](Self::launch), with a function that says whether the server is ready instead of a command.
    pub fn launch_with_probe(
        kind: &'static str,
        prepare: impl FnOnce(&Path) -> Result<()>,
        start: impl Fn(&Path, u16) -> Command + Send + Sync + 'static,
        ready: impl Fn(u16) -> Result<bool> + Send + Sync + 'static,
    ) -> Result<Self> {
        // Not on tmpfs, so that fsync costs what it does in production, and where the server's user has access.
        let directory = tempfile::Builder::new().prefix("stampede-server-").tempdir_in("/var/tmp")?;
        prepare(directory.path())?;
        let (start, ready) = (Box::new(start), Box::new(ready));
        let mut server = Self { kind, port: 0, start, ready, process: Mutex::new(None), directory };
        let mut tries = 0;
        loop {
            server.port = free_port()?;
            tries += 1;
            match server.restart() {
                Err(error) if error.kind() == ErrorKind::AddrInUse && tries < PORTS_TRIED => {}
                outcome => return outcome.map(|()| server),
            }
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts the server again on the same data and port, and waits until it is ready.
    pub fn restart(&self) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.log())?;
        let mut command = (self.start)(self.directory.path(), self.port);
        command.stderr(log);
        let mut process = Process::start_in(command, Some(self.directory.path()))?;
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let ended = process.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.log()).unwrap_or_default();
                let taken = ended.is_some() && TcpListener::bind(self.address()).is_err();
                let kind = if taken { ErrorKind::AddrInUse } else { ErrorKind::Other };
                return Err(Error::new(kind, format!("{} did not start ({ended:?}):\n{log}", self.kind)));
            }
            if (self.ready)(self.port)? {
                break;
            }
            pause();
        }
        *self.process.lock() = Some(process);
        Ok(())
    }

    /// Sends SIGKILL and waits until the port refuses connections.
    pub fn kill(&self) -> Result<()> {
        if let Some(mut process) = self.process.lock().take() {
            process.kill()?;
        }
        let deadline = Instant::now() + READY_TIMEOUT;
        while TcpStream::connect(self.address()).is_ok() {
            if Instant::now() > deadline {
                return Err(Error::other(format!("{} still accepts connections after SIGKILL", self.kind)));
            }
            pause();
        }
        Ok(())
    }

    /// Sends SIGTERM and waits until the server has stopped.
    pub fn stop(&self) -> Result<()> {
        if let Some(mut process) = self.process.lock().take() {
            process.signal("TERM")?;
            process.wait(READY_TIMEOUT)?;
        }
        Ok(())
    }

    /// Sends a signal by its name, such as `STOP` or `CONT`.
    pub fn signal(&self, name: &str) -> Result<()> {
        match &*self.process.lock() {
            Some(process) => process.signal(name),
            None => Err(Error::other(format!("{} is not running", self.kind))),
        }
    }

    fn log(&self) -> PathBuf {
        self.directory.path().join("log")
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on port {}", self.kind, self.port)
    }
}

/// Returns a free port. The port 10,000 above it is free as well, because a node of a Redis cluster uses both.
///
/// It is below the range from which the system takes the ports of outgoing connections (32768 and up on Linux). Otherwise a client that
/// tries to reach a server that was killed could be given the server's own port, and the server could not be started again.
pub fn free_port() -> Result<u16> {
    loop {
        let port = rand::random_range(10_000..22_000);
        if [port, port + 10_000].iter().all(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return Ok(port);
        }
    }
}

fn without_stdio(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Runs a command to its end and returns its standard output.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(Error::other(format!("{:?} failed: {stdout}{stderr}", command.get_program())))
}

/// Fails with [`ErrorKind::NotFound`] if a program is not installed. As root, the failure of a program that needs its user, or that starts
/// it as that user, would not say so.
pub(crate) fn require_program(program: &Path) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Joining an absolute path replaces the directory.
    if std::env::split_paths(&path).any(|directory| directory.join(program).exists()) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::NotFound, format!("{} is not installed", program.display())))
}

/// A command that runs as another user if this process is root: the servers refuse to run as root.
pub(crate) fn command_as_user(user: &str, program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "--"]).arg(program);
    command
}

/// Makes the user that the server runs as the owner of a directory.
pub(crate) fn change_owner(user: &str, directory: &Path) -> Result<()> {
    if is_root() {
        run(Command::new("chown").arg(format!("{user}:")).arg(directory))?;
    }
    Ok(())
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_not_found() {
        require_program(Path::new("sh")).unwrap();
        require_program(Path::new("/bin/sh")).unwrap();
        for missing in ["stampede-no-such-program", "/nonexistent/sh"] {
            assert_eq!(require_program(Path::new(missing)).unwrap_err().kind(), ErrorKind::NotFound);
        }
    }
}
