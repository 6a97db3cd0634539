//! The data directory: readable by its owner only, locked by one process at a time; and the administrator's token in it.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rand::RngExt as _;
use stampede_ledger::Database;

/// Locks the directory until dropped. The kernel releases the lock when the process ends, for whatever reason.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    pub fn lock(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("cannot create the data directory {shown}"))?;
        let lock = lock_file(&path.join("lock"), &format!("the data directory {shown}"), "--data-dir")?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The default file of the administrator's token.
    pub fn admin_token(&self) -> PathBuf {
        self.path.join("admin-token")
    }

    /// Creates the administrator's token unless it exists.
    pub fn create_admin_token(&self) -> anyhow::Result<()> {
        let path = self.admin_token();
        if path.exists() {
            return Ok(());
        }
        // Written to another file and renamed, so that a crash cannot leave a partial token.
        let temporary = self.path.join("admin-token.new");
        let create = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            writeln!(file, "{:032x}", rand::rng().random::<u128>())?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)
        };
        create().with_context(|| format!("cannot write the admin token to {}", path.display()))
    }
}

/// Locks an embedded database: the gate is in the memory of one process, so another must not change the database. `None` for a
/// database server.
pub fn lock_database(database: &Database) -> anyhow::Result<Option<File>> {
    let Database::Sqlite(path) = database else { return Ok(None) };
    let mut lock = path.clone().into_os_string();
    lock.push(".lock");
    lock_file(Path::new(&lock), &format!("the database {}", path.display()), "--database").map(Some)
}

fn lock_file(lock: &Path, what: &str, flag: &str) -> anyhow::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(lock);
    let file = file.with_context(|| format!("cannot write {}", lock.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            bail!("another stampede process uses {what}; stop it, or choose another with {flag}")
        }
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", lock.display())),
    }
}
