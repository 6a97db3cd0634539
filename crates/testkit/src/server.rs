//! What private servers have in common: a free port, a folder of their own, a start that waits until they answer, and an end
//! by their pid.

use std::io::{Error, Result};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::process::{Process, pause};

/// How long a server may take to answer.
const READY_TIMEOUT: Duration = Duration::from_secs(60);

/// The command that starts a server with this folder on this port.
type Start = dyn Fn(&Path, u16) -> Command + Send + Sync;

/// A server of ours. It ends when it is dropped, and also when the test process dies.
pub struct Server {
    kind: &'static str,
    port: u16,
    start: Box<Start>,
    ready: fn(u16) -> Command,
    process: Mutex<Option<Process>>,
    folder: TempDir,
}

impl Server {
    /// Starts it with the folder that `prepare` has filled.
    pub(crate) fn launch(
        kind: &'static str,
        prepare: impl FnOnce(&Path) -> Result<()>,
        start: impl Fn(&Path, u16) -> Command + Send + Sync + 'static,
        ready: fn(u16) -> Command,
    ) -> Result<Self> {
        // On a disk, and where another user may pass through.
        let folder = tempfile::Builder::new().prefix("testkit-").tempdir_in("/var/tmp")?;
        prepare(folder.path())?;
        let server =
            Self { kind, port: free_port()?, start: Box::new(start), ready, process: Mutex::new(None), folder };
        server.restart()?;
        Ok(server)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts it again on the same data, and waits until it answers.
    pub fn restart(&self) -> Result<()> {
        let log = std::fs::File::options().create(true).append(true).open(self.log())?;
        let mut command = (self.start)(self.folder.path(), self.port);
        command.stderr(log);
        let mut process = Process::start_in(command, Some(self.folder.path()))?;
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let ended = process.ended()?;
            if ended.is_some() || Instant::now() > deadline {
                let log = std::fs::read_to_string(self.log()).unwrap_or_default();
                return Err(Error::other(format!("{} did not start ({ended:?}):\n{log}", self.kind)));
            }
            if silent(&mut (self.ready)(self.port)).status()?.success() {
                break;
            }
            pause();
        }
        *self.process() = Some(process);
        Ok(())
    }

    /// `kill -9`, and waits until the port has stopped answering.
    pub fn kill(&self) -> Result<()> {
        if let Some(mut process) = self.process().take() {
            process.kill()?;
        }
        let deadline = Instant::now() + READY_TIMEOUT;
        while std::net::TcpStream::connect(self.address()).is_ok() {
            if Instant::now() > deadline {
                return Err(Error::other(format!("{} answers though it was killed", self.kind)));
            }
            pause();
        }
        Ok(())
    }

    /// Sends a signal by its name, such as `STOP` or `CONT`.
    pub fn signal(&self, name: &str) -> Result<()> {
        match &*self.process() {
            Some(process) => process.signal(name),
            None => Err(Error::other(format!("{} is not running", self.kind))),
        }
    }

    fn process(&self) -> std::sync::MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on port {}", self.kind, self.port)
    }
}

/// A free port. Some servers (a node of a Redis cluster) also use the one 10,000 above: that is free, too.
fn free_port() -> Result<u16> {
    loop {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        if let Some(second) = port.checked_add(10_000)
            && TcpListener::bind(("127.0.0.1", second)).is_ok()
        {
            return Ok(port);
        }
    }
}

fn silent(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Runs a command to its end; what it said.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output()?;
    let told = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    if output.status.success() {
        return Ok(told);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(Error::other(format!("{:?} failed: {told}{error}", command.get_program())))
}

/// A command as another user, if we are root: servers refuse to run as root.
pub(crate) fn as_user(user: &str, program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "--"]).arg(program);
    command
}

/// Gives a folder to the user that the server runs as.
pub(crate) fn give_to(user: &str, folder: &Path) -> Result<()> {
    if is_root() {
        run(Command::new("chown").arg(format!("{user}:")).arg(folder))?;
    }
    Ok(())
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}
