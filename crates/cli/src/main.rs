//! `stampede`: one binary, one file per subcommand.
//!
//! - [`serve`]: the server; [`demo`] fills it with something to look at
//! - [`sender`], [`webhook`]: bring login codes to phones
//! - [`migrate`]: brings the database's tables up to date
//! - [`config`]: shows or checks the settings; [`completions`]: for shells
//! - [`settings`]: defaults, file, environment and flags into one value

mod completions;
mod config;
mod data_dir;
mod demo;
mod migrate;
mod sender;
mod serve;
mod settings;
mod webhook;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A flash-sale engine: never oversells, loses no order it has confirmed.
#[derive(Debug, Parser)]
#[command(name = "stampede", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the server
    ///
    /// Settings come from the compiled-in defaults (config/default.toml in the source), then the file given with --config, then
    /// the environment (STAMPEDE__HTTP__MAX_CONNECTIONS=500 sets http.max_connections), then these flags.
    Serve(serve::Serve),
    /// Bring the database's tables up to date and exit
    ///
    /// `serve` does the same when it starts; this is for doing it beforehand.
    Migrate(migrate::Migrate),
    /// Show or check the settings
    Config(config::Config),
    /// Print completions for a shell
    ///
    /// For bash: `stampede completions bash > ~/.local/share/bash-completion/completions/stampede`
    Completions(completions::Completions),
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Serve(command) => command.run(),
        Command::Migrate(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Completions(command) => {
            command.run();
            Ok(())
        }
    };
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            // The whole chain on one line: what failed, and why.
            eprintln!("stampede: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}
