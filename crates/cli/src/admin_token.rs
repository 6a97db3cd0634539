//! The tokens of administrators: those that the server accepts, and the one that commands send to a running server.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use stampede_http::{AdminToken, Role};

use crate::settings::{Settings, TokenSetting};

const VARIABLE: &str = "STAMPEDE_ADMIN_TOKEN";
/// The name of the administrator whose token is in the environment, in `admin.token_file` or in the data directory.
const FIRST_ADMINISTRATOR: &str = "admin";

/// Whether the first administrator's token is the one in the data directory.
pub fn is_in_data_dir(settings: &Settings) -> bool {
    std::env::var_os(VARIABLE).is_none() && settings.admin.token_file().is_none()
}

/// Reads the token of every administrator. Also returns where the first one's token comes from, for the banner.
pub fn read_all(settings: &Settings, in_data_dir: &Path) -> anyhow::Result<(Vec<AdminToken>, String)> {
    let accept = |name: &str, role, token: &str, source: &str| {
        AdminToken::new(name, role, token)
            .with_context(|| format!("the token of the administrator {name:?} in {source}"))
    };
    let from_file = |name, role, path: &Path| {
        warn_if_public(path)?;
        accept(name, role, &read_file(path)?, &path.display().to_string())
    };
    let (first, shown) = match std::env::var_os(VARIABLE) {
        Some(token) => {
            let token = token.into_string().ok().with_context(|| format!("{VARIABLE} is not valid text"))?;
            (accept(FIRST_ADMINISTRATOR, Role::Operator, &token, VARIABLE)?, format!("token from {VARIABLE}"))
        }
        None => {
            let path = settings.admin.token_file().unwrap_or(in_data_dir);
            (from_file(FIRST_ADMINISTRATOR, Role::Operator, path)?, format!("token in {}", path.display()))
        }
    };
    let mut tokens = vec![first];
    for (name, TokenSetting { role, file }) in &settings.admin.tokens {
        if name == FIRST_ADMINISTRATOR {
            bail!("admin.tokens: {FIRST_ADMINISTRATOR:?} is the name of the first administrator; choose another");
        }
        tokens.push(from_file(name, (*role).into(), file)?);
    }
    if let Some((one, other)) = AdminToken::find_equal(&tokens) {
        bail!(
            "the administrators {one:?} and {other:?} have the same token; every administrator needs a token of their own"
        );
    }
    Ok((tokens, shown))
}

fn warn_if_public(path: &Path) -> anyhow::Result<()> {
    let metadata = std::fs::metadata(path);
    let metadata = metadata.with_context(|| format!("cannot read the admin token in {}", path.display()))?;
    if metadata.permissions().mode() & 0o004 != 0 {
        tracing::warn!("the admin token in {} is readable by every user of this machine", path.display());
    }
    Ok(())
}

fn read_file(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read the admin token in {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Where the token to send comes from. It is never an argument: those are visible to every user of the machine and stay in the
/// shell's history.
#[derive(Debug, Args)]
pub struct AdminTokenSource {
    /// A file with the token of an administrator of the target [default: the environment variable STAMPEDE_ADMIN_TOKEN]
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,
}

impl AdminTokenSource {
    /// Reads the token from the given file, otherwise from the environment.
    pub fn read(&self) -> anyhow::Result<String> {
        let (token, source) = match &self.admin_token_file {
            Some(path) => (read_file(path)?, path.display().to_string()),
            None => match std::env::var(VARIABLE) {
                Ok(token) => (token, VARIABLE.to_owned()),
                Err(_) => bail!("--target needs --admin-token-file or {VARIABLE}"),
            },
        };
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            bail!("the admin token from {source} must consist of visible ASCII characters without spaces");
        }
        Ok(token)
    }
}
