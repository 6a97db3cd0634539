//! The data folder: made readable by its owner alone, held by one process at a time; and the administrator's token in it.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rand::RngExt as _;
use stampede_http::{AdminToken, Role};
use stampede_ledger::Database;

use crate::settings::{Settings, TokenSetting};

/// Holds the folder until dropped. The lock is the kernel's: it goes with the process, however that ends.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

const SHORTEST_TOKEN: usize = 16;
/// The name of the administrator whose token comes from the environment or this folder.
const FIRST: &str = "admin";

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

    /// Everybody who administers; and where the first one's token came from, to be shown.
    pub fn admin_tokens(&self, settings: &Settings) -> anyhow::Result<(Vec<AdminToken>, String)> {
        let (first, from) = self.first_token(settings.admin_token_file())?;
        let mut tokens = vec![AdminToken::new(FIRST, Role::Operator, first)];
        for (name, TokenSetting { role, file }) in settings.admin_tokens() {
            if name == FIRST {
                bail!("admin.tokens: {FIRST:?} is the name of the first administrator; choose another");
            }
            tokens.push(AdminToken::new(name.as_str(), (*role).into(), read_token(file)?));
        }
        Ok((tokens, from))
    }

    /// From the environment, from the given file, or kept in this folder and made at the first start.
    fn first_token(&self, given: Option<&Path>) -> anyhow::Result<(String, String)> {
        if let Some(token) = std::env::var_os("STAMPEDE_ADMIN_TOKEN") {
            let token = token.into_string().ok().context("STAMPEDE_ADMIN_TOKEN is not valid text")?;
            return Ok((check(&token, "STAMPEDE_ADMIN_TOKEN")?, "token from STAMPEDE_ADMIN_TOKEN".into()));
        }
        let path = match given {
            Some(path) => path.to_owned(),
            None => self.made_token()?,
        };
        Ok((read_token(&path)?, format!("token in {}", path.display())))
    }

    fn made_token(&self) -> anyhow::Result<PathBuf> {
        let path = self.path.join("admin-token");
        if path.exists() {
            return Ok(path);
        }
        // Written aside and renamed, so that a crash leaves no half a token.
        let aside = self.path.join("admin-token.new");
        let make = || -> std::io::Result<()> {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
            writeln!(file, "{:032x}", rand::rng().random::<u128>())?;
            file.sync_all()?;
            std::fs::rename(&aside, &path)
        };
        make().with_context(|| format!("cannot write the admin token to {}", path.display()))?;
        Ok(path)
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

fn read_token(path: &Path) -> anyhow::Result<String> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the admin token in {shown}"))?;
    check(text.trim(), &shown)
}

fn check(token: &str, from: &str) -> anyhow::Result<String> {
    if token.len() < SHORTEST_TOKEN || !token.bytes().all(|b| b.is_ascii_graphic()) {
        bail!("the admin token from {from} must have at least {SHORTEST_TOKEN} visible ASCII characters and no spaces");
    }
    Ok(token.to_owned())
}
