//! `stampede`: one binary, one file per subcommand.
//!
//! - [`serve`]: the server; [`work`]: a consumer of the queue without a server; [`demo`]: a whole system to be tried; [`demo_data`]: demonstration data
//! - [`sender`], [`webhook`]: deliver login codes; [`alerts`]: delivers alerts; [`event_sender`]: posts the steps of orders
//! - [`mod@bench`]: the load test; [`check`]: checks the invariants; `lab`: known versions of a flash sale side by side (cargo feature `lab`)
//! - [`quarantine`]: orders that could not be recorded; [`dead_letters`]: messages that could not be read; [`events`]: events that the receiver has rejected; [`reconcile`], [`rebuild`]: the gate compared with the ledger, or loaded from it;
//!   [`admin_client`]: calls a running server for them
//! - [`migrate`]: migrates the database
//! - [`config`]: shows or checks the settings; [`completions`]: shell completions
//! - [`settings`]: merges defaults, file, environment and flags; [`admin_token`]: the tokens of administrators
//! - [`data_dir`]: the data directory; [`session_key`]: the key of session tokens
//! - [`reload`]: what SIGHUP reloads; [`descriptors`]: the limit of open files
//! - [`private_servers`]: servers and nodes that `bench` and `demo` start; [`redact`]: removes credentials from URLs

mod admin_client;
mod admin_token;
mod alerts;
mod bench;
mod check;
mod completions;
mod config;
mod data_dir;
mod dead_letters;
mod demo;
mod demo_data;
mod descriptors;
mod event_sender;
mod events;
#[cfg(feature = "lab")]
mod lab;
mod migrate;
mod payment_provider;
mod private_servers;
mod quarantine;
mod rebuild;
mod reconcile;
mod redact;
mod reload;
mod sender;
mod serve;
mod session_key;
mod settings;
mod webhook;
mod work;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A flash-sale engine that never oversells and never loses a confirmed order
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
    /// SIGTERM and SIGINT stop it gracefully; SIGHUP reloads administrator tokens, certificate and key.
    Serve(serve::Serve),
    /// Record the orders of the tiers queued and shielded, without serving buyers
    ///
    /// Any number of these can run beside the nodes, or instead of their own consumers (queue.consume = false). Settings are those of
    /// `serve`; --listen is the address of /healthz, /readyz and /metrics. SIGTERM finishes the batch that is being recorded.
    Work(work::Work),
    /// Start a system with demonstration data and private servers, to try it
    ///
    /// All tiers but solo need PostgreSQL and Redis to be installed, and --queue rabbitmq needs RabbitMQ; they run with temporary data, and
    /// stop with Ctrl-C. Login codes are shown to everyone, so the nodes listen on loopback addresses only.
    Demo(demo::Demo),
    /// Migrate the database and exit
    ///
    /// `serve` does the same when it starts.
    Migrate(migrate::Migrate),
    /// Run a load test and verify the result
    ///
    /// Starts a system, or uses a running one. Three kinds of requests are measured in turn: a no-op route, orders, and refusals
    /// after a sell-out. A storm of many more buyers than stock follows. At the end every response is compared with the ledger and
    /// the gates.
    ///
    /// Exit codes: 0: no violation; 1: anything was oversold, undersold, duplicated, lost or wrong, or the run failed; 2: no violation, but
    /// rate limits of the target refused so many attempts that the figures do not show what it can do.
    Bench(bench::Bench),
    /// Check the invariants of a running or a stopped system
    ///
    /// Nothing is written or migrated. A running system is read repeatedly for several seconds, and only findings that persist count.
    /// What cannot be checked, such as the gate of a stopped system, is printed as "not checkable", never as passed.
    ///
    /// Exit codes: 0: every invariant that could be checked holds; 1: an invariant is violated; 2: nothing could be checked (for
    /// example because there are no sales, or none with the id in --sale), or the system or its database could not be read.
    Check(check::Check),
    /// Run the known versions of a flash sale, flawed and sound, and measure them side by side
    ///
    /// Every version runs against private servers, which are started and stopped. Races and failures are provoked, so that each flawed
    /// version is seen to fail and each sound one to hold. Without options, all versions run, for several minutes.
    ///
    /// Exit codes: 0: every flawed version failed and every sound one held; 1: a version came out otherwise or could not be run, or there is
    /// no such version; 2: no such surprise, but a server is not installed, and its versions were skipped; or, before anything runs, the
    /// command line is not valid; 130: SIGINT or SIGTERM.
    #[cfg(feature = "lab")]
    Lab(lab::Lab),
    /// List, retry or discard orders that could not be recorded
    ///
    /// Such orders keep their stock until an operator acts. The command calls a running server.
    Quarantine(quarantine::Quarantine),
    /// List, show, retry or discard messages of the queue that could not be read
    ///
    /// The command calls a running server.
    DeadLetters(dead_letters::DeadLetters),
    /// List or retry events of orders that the receiver has rejected
    ///
    /// Only with events.webhook_url. Such an event, and the later ones of its order, are not sent until an operator acts. The command calls a
    /// running server.
    Events(events::Events),
    /// Compare the gate with the database and repair what differs
    ///
    /// Only for tiers with a gate in Redis; every node does the same at intervals. A difference counts if it is found twice, a few
    /// seconds apart. The command calls a running server. Exit codes: 0: nothing differs, or everything was repaired; 1: a dry run has
    /// found something, or a repair failed.
    Reconcile(reconcile::Reconcile),
    /// Rebuild the gate from the database
    ///
    /// Only for tiers with a gate in Redis. Sales are closed meanwhile, usually for less than a second. Nodes do this by themselves when
    /// Redis has lost the gate. The command calls a running server.
    Rebuild(rebuild::Rebuild),
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
        Command::Work(command) => command.run().map(success),
        Command::Demo(command) => command.run().map(success),
        Command::Migrate(command) => command.run().map(success),
        Command::Bench(command) => command.run(),
        Command::Check(command) => Ok(command.run()),
        #[cfg(feature = "lab")]
        Command::Lab(command) => command.run(),
        Command::Quarantine(command) => command.run().map(success),
        Command::DeadLetters(command) => command.run().map(success),
        Command::Events(command) => command.run().map(success),
        Command::Reconcile(command) => command.run(),
        Command::Rebuild(command) => command.run(),
        Command::Config(command) => command.run().map(success),
        Command::Completions(command) => {
            command.run();
            Ok(ExitCode::SUCCESS)
        }
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            // The whole chain of causes on one line.
            eprintln!("stampede: {error:#}");
            ExitCode::FAILURE
        }
    }
}
