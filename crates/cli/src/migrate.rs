//! `stampede migrate`

use std::io::Write as _;

use anyhow::Context as _;
use clap::Args;

use crate::data_dir::{DataDir, lock_database};
use crate::settings::{Flags, ServeFlags, Settings};

#[derive(Debug, Args)]
pub struct Migrate {
    #[command(flatten)]
    flags: Flags,
}

impl Migrate {
    pub fn run(self) -> anyhow::Result<()> {
        let settings = Settings::load(&self.flags, &ServeFlags::default())?;
        let database = settings.database()?;
        let _lock = (DataDir::lock(&settings.data_dir)?, lock_database(&database)?);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(stampede_ledger::open(&database)).with_context(|| database.to_string())?;
        writeln!(std::io::stdout(), "{database} is up to date")?;
        Ok(())
    }
}
