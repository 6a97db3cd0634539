//! `stampede work`

use clap::Args;

use crate::serve::{self, Role};
use crate::settings::{Flags, ServeFlags, Settings};

#[derive(Debug, Args)]
pub struct Work {
    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    serve: ServeFlags,
}

impl Work {
    pub fn run(self) -> anyhow::Result<()> {
        let settings = Settings::load(&self.flags, &self.serve)?.for_worker()?;
        serve::start(self.flags, self.serve, settings, Role::Work)
    }
}
