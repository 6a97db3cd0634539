//! The section `[admin]`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use stampede_http::Role;

use super::{Limit, at_least_one};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    token_file: String,
    /// The additional administrators, by name.
    pub tokens: BTreeMap<String, TokenSetting>,
    pub wrong_tokens_per_address: Limit,
}

/// An additional administrator.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenSetting {
    pub role: RoleSetting,
    pub file: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoleSetting {
    Viewer,
    Operator,
}

impl From<RoleSetting> for Role {
    fn from(role: RoleSetting) -> Self {
        match role {
            RoleSetting::Viewer => Self::Viewer,
            RoleSetting::Operator => Self::Operator,
        }
    }
}

impl Admin {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        at_least_one(&[
            ("admin.wrong_tokens_per_address.count", self.wrong_tokens_per_address.count.into()),
            ("admin.wrong_tokens_per_address.window_ms", self.wrong_tokens_per_address.window_ms),
        ])
    }

    pub fn token_file(&self) -> Option<&Path> {
        (!self.token_file.is_empty()).then(|| Path::new(&self.token_file))
    }
}
