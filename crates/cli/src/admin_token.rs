//! The administrator token that `bench` and `check` send. Never a command-line value: those are visible to every user of the
//! machine and stay in the shell's history.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::Args;

const VARIABLE: &str = "STAMPEDE_ADMIN_TOKEN";

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
            Some(path) => {
                let shown = path.display().to_string();
                let text = std::fs::read_to_string(path);
                (text.with_context(|| format!("cannot read the admin token in {shown}"))?, shown)
            }
            None => match std::env::var(VARIABLE) {
                Ok(token) => (token, VARIABLE.to_owned()),
                Err(_) => bail!("--target needs --admin-token-file or {VARIABLE}"),
            },
        };
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            bail!("the admin token from {source} must be visible ASCII characters without spaces");
        }
        Ok(token.to_owned())
    }
}
