//! A clock for private servers that a test can set while they run, with libfaketime.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{Error, Result};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use tempfile::TempDir;

/// A clock that runs at the usual speed with an offset from the real time.
#[derive(Debug)]
pub struct FakeClock {
    library: PathBuf,
    directory: TempDir,
}

impl FakeClock {
    /// Starts with an offset of zero. Fails if libfaketime is not installed.
    pub fn new() -> Result<Self> {
        let library = library().ok_or_else(|| Error::other("libfaketime is not installed"))?;
        // The servers do not run as root and must be able to read the file.
        let directory = tempfile::Builder::new().prefix("testkit-clock-").tempdir_in("/var/tmp")?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        let clock = Self { library, directory };
        clock.set(0)?;
        Ok(clock)
    }

    /// Sets the offset from the real time. Running servers see it at once.
    pub fn set(&self, offset_s: i64) -> Result<()> {
        std::fs::write(self.file(), format!("{offset_s:+}\n"))
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("clock")
    }

    /// The environment variables of a server that uses this clock. Only the wall clock is changed, not the monotonic clock.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_PRELOAD", self.library.clone().into()),
            ("FAKETIME_TIMESTAMP_FILE", self.file().into()),
            ("FAKETIME_NO_CACHE", "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ]
    }
}

/// The library for programs with threads; its directory depends on the distribution.
fn library() -> Option<PathBuf> {
    let directories = std::fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path());
    directories.map(|directory| directory.join("faketime/libfaketimeMT.so.1")).find(|path| path.exists())
}
