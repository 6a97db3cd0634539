//! `stampede completions`

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

#[derive(Debug, Args)]
pub struct Completions {
    /// Which shell to write them for
    shell: Shell,
}

impl Completions {
    pub fn run(&self) {
        clap_complete::generate(self.shell, &mut crate::Cli::command(), "stampede", &mut std::io::stdout());
    }
}
