//! A child process that is killed by its pid, also when the test process dies.
//!
//! Beside the child runs a small guard: a shell that holds the end of a pipe. When our end closes, however we end, the guard
//! kills the child.

use std::io::{BufRead as _, BufReader, Error, Result};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// `$0` is the child's pid, `$1` a folder to remove or nothing. The child's own children may need a moment to notice.
const GUARD: &str = r#"
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
    guard: Child,
    lines: Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts the command. Its standard output is read line by line; its standard error goes where the test's goes.
    pub fn start(command: Command) -> Result<Self> {
        Self::start_in(command, None)
    }

    /// The same; and if the test process dies, this folder goes too.
    pub fn start_in(mut command: Command, folder: Option<&Path>) -> Result<Self> {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let guard = Command::new("sh")
            .args(["-c", GUARD])
            .arg(child.id().to_string())
            .arg(folder.unwrap_or(Path::new("")))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let guard = match guard {
            Ok(guard) => guard,
            Err(error) => {
                child.kill()?;
                child.wait()?;
                return Err(error);
            }
        };
        let (tell, lines) = sync_channel(1000);
        let out = child.stdout.take().ok_or_else(|| Error::other("no standard output"))?;
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
                // Read to the end even if nobody listens: a full pipe would stop the child. Lines beyond the bound are lost.
                let _ = tell.try_send(line);
            }
        });
        Ok(Self { child, guard, lines, reader: Some(reader) })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The first line of output for which `find` has something to say.
    pub fn wait_for<T>(&mut self, within: Duration, find: impl Fn(&str) -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + within;
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
                    return Err(Error::other(format!("the awaited line never came; exit status: {status:?}")));
                }
            }
        }
    }

    /// `kill -9`, and waits until it is gone.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    /// Sends a signal by its name, such as `TERM` or `STOP`.
    pub fn signal(&self, name: &str) -> Result<()> {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status()?;
        if sent.success() { Ok(()) } else { Err(Error::other(format!("kill -{name} failed"))) }
    }

    /// Has it ended?
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                return Err(Error::other(format!("process {} did not end within {within:?}", self.pid())));
            }
            pause();
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a process cannot be waited for with a deadline but by looking again")]
pub(crate) fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}

/// Did it end by this signal?
pub fn died_of(status: ExitStatus, signal: i32) -> bool {
    status.signal() == Some(signal)
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ending twice is no error here, and there is nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The guard before its pipe closes, so that it never kills a later process of the same number.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
