//! `stampede`: one binary, one file per subcommand.
//!
//! - [`serve`]: the server; [`demo`] fills it with something to look at
//! - [`sender`], [`webhook`]: bring login codes to phones
//! - [`mod@bench`]: load that proves; [`check`]: the invariants
//! - [`quarantine`]: orders that could not be recorded
//! - [`migrate`]: brings the database's tables up to date
//! - [`config`]: shows or checks the settings; [`completions`]: for shells
//! - [`settings`]: defaults, file, environment and flags into one value; [`admin_token`]: the tokens of administrators
//! - [`reload`]: what SIGHUP reads again; [`descriptors`]: how many connections there is room for
//! - [`redact`]: credentials in URLs are not shown

mod admin_token;
mod bench;
mod check;
mod completions;
mod config;
mod data_dir;
mod demo;
mod descriptors;
mod migrate;
mod quarantine;
mod redact;
mod reload;
mod sender;
mod serve;
mod session_key;
mod settings;
mod webhook;

use std::process::ExitCode;

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
    ///
    /// SIGTERM and SIGINT stop it gracefully; SIGHUP reads administrator tokens, certificate and key again.
    Serve(serve::Serve),
    /// Bring the database's tables up to date and exit
    ///
    /// `serve` does the same when it starts; this is for doing it beforehand.
    Migrate(migrate::Migrate),
    /// Put a system under load, measure it, and prove that it sold right
    ///
    /// Starts a system of its own, or aims at one that runs. Three kinds of requests are measured in turns: a route that does
    /// nothing, orders, and refusals after a sell-out. Then a storm of many more buyers than stock. In the end everything that was
    /// heard is held against ledger and gate; the exit code is 1 if anything was oversold, undersold, duplicated, lost or wrong.
    Bench(bench::Bench),
    /// Check the invariants of a live or a stopped system
    ///
    /// Reads only; nothing is written or migrated. On a live system a finding counts if every look over several seconds shows it. What
    /// cannot be checked, such as the gate of a stopped system, is printed as "not checkable", never as passed.
    ///
    /// Exit codes: 0 every invariant that could be checked holds; 1 an invariant is violated; 2 nothing could be checked (no sales, say),
    /// or the system or its database could not be read.
    Check(check::Check),
    /// List, retry or discard orders that could not be recorded
    ///
    /// Such orders keep their stock until an operator acts. The command speaks to a running server.
    Quarantine(quarantine::Quarantine),
    /// Show or check the settings
    Config(config::Config),
    /// Print completions for a shell
    ///
    /// For bash: `stampede completions bash > ~/.local/share/bash-completion/completions/stampede`
    Completions(completions::Completions),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let success = |()| ExitCode::SUCCESS;
    let done = match cli.command {
        Command::Serve(command) => command.run().map(success),
        Command::Migrate(command) => command.run().map(success),
        Command::Bench(command) => command.run(),
        Command::Check(command) => Ok(command.run()),
        Command::Quarantine(command) => command.run().map(success),
        Command::Config(command) => command.run().map(success),
        Command::Completions(command) => {
            command.run();
            Ok(ExitCode::SUCCESS)
        }
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            // The whole chain on one line: what failed, and why.
            eprintln!("stampede: {error:#}");
            ExitCode::FAILURE
        }
    }
}
