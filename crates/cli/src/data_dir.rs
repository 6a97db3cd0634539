//! The data folder: made readable by its owner alone, held by one process at a time; and the administrator's token in it.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rand::RngExt as _;
use stampede_ledger::Database;

/// Holds the folder until dropped. The lock is the kernel's: it goes with the process, however that ends.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    pub fn hold(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("cannot make the data folder {shown}"))?;
        let lock = hold(&path.join("lock"), &format!("the data folder {shown}"), "--data-dir")?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Where the administrator's token is, unless the settings say otherwise.
    pub fn admin_token(&self) -> PathBuf {
        self.path.join("admin-token")
    }

    /// Makes the administrator's token, unless it is there.
    pub fn make_admin_token(&self) -> anyhow::Result<()> {
        let path = self.admin_token();
        if path.exists() {
            return Ok(());
        }
        // Written aside and renamed, so that a crash leaves no half a token.
        let aside = self.path.join("admin-token.new");
        let make = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
            writeln!(file, "{:032x}", rand::rng().random::<u128>())?;
            file.sync_all()?;
            std::fs::rename(&aside, &path)
        };
        make().with_context(|| format!("cannot write the admin token to {}", path.display()))
    }
}

/// Holds an embedded database, wherever it is: what one process has in memory, another must not change. `None` for a database
/// server.
pub fn hold_database(database: &Database) -> anyhow::Result<Option<File>> {
    let Database::Sqlite(path) = database else { return Ok(None) };
    let mut lock = path.clone().into_os_string();
    lock.push(".lock");
    hold(Path::new(&lock), &format!("the database {}", path.display()), "--database").map(Some)
}

fn hold(lock: &Path, what: &str, flag: &str) -> anyhow::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(lock);
    let file = file.with_context(|| format!("cannot write {}", lock.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("another stampede uses {what}; stop it, or choose another with {flag}"),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", lock.display())),
    }
}
