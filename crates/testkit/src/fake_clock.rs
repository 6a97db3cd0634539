//! A clock for servers of ours that can be set while they run, by libfaketime.

use std::ffi::OsString;
use std::fs::Permissions;
use std::io::{Error, Result};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use tempfile::TempDir;

/// Runs at the usual speed, so many seconds from the real time.
#[derive(Debug)]
pub struct FakeClock {
    library: PathBuf,
    folder: TempDir,
}

impl FakeClock {
    /// Right at first. Fails if libfaketime is not installed.
    pub fn new() -> Result<Self> {
        let library = library().ok_or_else(|| Error::other("libfaketime is not installed"))?;
        // Where another user may read it: servers do not run as root.
        let folder = tempfile::Builder::new().prefix("testkit-clock-").tempdir_in("/var/tmp")?;
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let clock = Self { library, folder };
        clock.set(0)?;
        Ok(clock)
    }

    /// From now on.
    pub fn set(&self, offset_s: i64) -> Result<()> {
        std::fs::write(self.file(), format!("{offset_s:+}\n"))
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("clock")
    }

    /// What a server needs in its environment. Only the clock of the day is set, not the one that waits are measured by.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_PRELOAD", self.library.clone().into()),
            ("FAKETIME_TIMESTAMP_FILE", self.file().into()),
            ("FAKETIME_NO_CACHE", "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ]
    }
}

/// The one for programs with threads, wherever the distribution puts it.
fn library() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path());
    folders.map(|folder| folder.join("faketime/libfaketimeMT.so.1")).find(|path| path.exists())
}
