//! A child process that is killed when its [`Process`] is dropped, and also when the parent process dies.
//!
//! A second child, the watchdog, is a shell that reads from a pipe. The pipe closes when the parent ends, for whatever reason, and the
//! watchdog then kills the child. Both are process groups of their own: Ctrl-C in a terminal reaches the parent alone, which decides in
//! what sequence its children end.

use std::io::{BufRead as _, BufReader, Error, Result};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// `$0` is the child's pid, `$1` a directory to remove, or empty. The removal is repeated because the child's own children may still write
/// to the directory for a moment.
const WATCHDOG: &str = r#"
    read -r _
    kill -9 "$0" 2>/dev/null
    [ -n "$1" ] || exit 0
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        rm -rf "$1" 2>/dev/null && exit 0
        sleep 0.3
    done
"#;

#[derive(Debug)]
pub struct Process {
    child: Child,
    watchdog: Child,
    lines: Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts the command. Its standard output is read line by line; its standard error is inherited.
    pub fn start(command: Command) -> Result<Self> {
        Self::start_in(command, None)
    }

    /// Like [`start`](Self::start). If the parent process dies, `directory` is removed as well.
    pub fn start_in(mut command: Command, directory: Option<&Path>) -> Result<Self> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
        let watchdog = Command::new("sh")
            .process_group(0)
            .args(["-c", WATCHDOG])
            .arg(child.id().to_string())
            .arg(directory.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let watchdog = match watchdog {
            Ok(watchdog) => watchdog,
            Err(error) => {
                child.kill()?;
                child.wait()?;
                return Err(error);
            }
        };
        let (sender, lines) = sync_channel(1000);
        let out = child.stdout.take().ok_or_else(|| Error::other("no standard output"))?;
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
                // Lines beyond the bound are dropped: a full pipe would block the child.
                let _ = sender.try_send(line);
            }
        });
        Ok(Self { child, watchdog, lines, reader: Some(reader) })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the first result of `find` that is `Some`, over the lines of output from now on.
    pub fn wait_for<T>(&mut self, timeout: Duration, find: impl Fn(&str) -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(found) = find(&line) {
                        return Ok(found);
                    }
                }
                Err(_) => {
                    let status = self.child.try_wait()?;
                    return Err(Error::other(format!(
                        "the expected line of output did not arrive; exit status: {status:?}"
                    )));
                }
            }
        }
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Sends a signal by its name, such as `TERM` or `STOP`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status()?;
        if sent.success() { Ok(()) } else { Err(Error::other(format!("kill -{name} failed"))) }
    }

    /// Returns the exit status if the process has ended.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until the process ends by itself.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(Error::other(format!("process {} did not end within {timeout:?}", self.pid())));
            }
            pause();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "std has no wait with a timeout, so the state is polled")]
pub fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}

/// Returns whether this signal ended the process.
pub fn was_killed_by(status: ExitStatus, signal: i32) -> bool {
    status.signal() == Some(signal)
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended already. An error cannot be returned from here.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The watchdog ends before its pipe closes, so that it cannot kill a later process that got the same pid.
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
