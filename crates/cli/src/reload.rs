//! SIGHUP reloads administrator tokens, certificate and key. If reading fails, the old ones stay in use.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use stampede_http::App;
use stampede_http::tls::Certificate;

use crate::admin_token;
use crate::settings::{Flags, ServeFlags, Settings};

pub struct Reload {
    pub flags: Flags,
    pub serve: ServeFlags,
    /// The token in the data directory.
    pub admin_token: PathBuf,
    pub app: Arc<App>,
    /// `None` without TLS.
    pub certificate: Option<Arc<Certificate>>,
}

impl Reload {
    /// Reloads the settings for the names and files of administrators and of TLS; other settings need a restart.
    pub fn run(&self) {
        let settings = match Settings::load(&self.flags, &self.serve) {
            Ok(settings) => settings,
            Err(error) => {
                tracing::error!("SIGHUP: nothing was reloaded: {error:#}");
                return;
            }
        };
        match admin_token::read_all(&settings, &self.admin_token) {
            Ok((tokens, first)) => {
                let administrators = tokens.len();
                self.app.replace_admin_tokens(tokens);
                tracing::info!(administrators, first, "SIGHUP: the administrator tokens were reloaded");
            }
            Err(error) => tracing::error!("SIGHUP: the administrator tokens were not reloaded: {error:#}"),
        }
        match self.reload_certificate(&settings) {
            Ok(true) => tracing::info!("SIGHUP: the certificate was reloaded"),
            Ok(false) => {}
            Err(error) => tracing::error!("SIGHUP: the certificate was not reloaded: {error:#}"),
        }
    }

    fn reload_certificate(&self, settings: &Settings) -> anyhow::Result<bool> {
        match (&self.certificate, settings.http.tls_files()?) {
            (None, None) => Ok(false),
            (Some(current), Some((certificate, key))) => {
                current.reload(certificate, key)?;
                Ok(true)
            }
            _ => Err(anyhow::anyhow!("the server was started with other settings"))
                .context("turning TLS on or off needs a restart"),
        }
    }
}
