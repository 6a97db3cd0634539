//! `stampede lab`: the known versions of a flash sale, flawed and sound, run and measured side by side.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use stampede_lab::report::{html, table, verdict};
use stampede_lab::{Expected, Family, Options, Progress, Version, VersionResult, registry};

/// A server is not installed, so some versions did not run; the others came out as expected.
const SERVER_MISSING: u8 = 2;

#[derive(Debug, Args)]
pub struct Lab {
    /// Run only these versions or families
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,

    /// List the versions with what is expected of them
    #[arg(long, conflicts_with_all = ["only", "explain"])]
    list: bool,

    /// Print the story of a version in English and Chinese, and run nothing
    #[arg(long, value_name = "NAME", conflicts_with = "only")]
    explain: Option<String>,

    /// Number of buyers in the load of each version
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(16..=1_000_000))]
    buyers: u64,

    /// Stock in the load of each version
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(8..=1_000_000))]
    stock: u64,

    /// Seed of the order of requests and of the moments of faults
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Write lab.html and lab.json to this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

impl Lab {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let mut out = std::io::stdout().lock();
        if let Some(name) = &self.explain {
            let version = registry::all().find(|version| version.name == name).ok_or_else(|| unknown(name))?;
            writeln!(out, "{}\n{}\n{}", version.name, version.story(), version.story_zh)?;
            return Ok(ExitCode::SUCCESS);
        }
        if self.list {
            write!(out, "{}", list())?;
            return Ok(ExitCode::SUCCESS);
        }
        let versions = registry::select(&self.only).map_err(|name| unknown(&name))?;
        let program = Some(std::env::current_exe().context("cannot find the program's own file")?);
        let options = Options { buyers: self.buyers, stock: self.stock, seed: self.seed, program };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let progress = Bar::new(self.json);
        let outcome = runtime.block_on(stampede_lab::run(options, &versions, &progress));
        progress.bar.finish_and_clear();
        if let Some(directory) = &self.report {
            let write = || {
                std::fs::create_dir_all(directory)?;
                std::fs::write(directory.join("lab.html"), html::page(&outcome))?;
                std::fs::write(directory.join("lab.json"), serde_json::to_string_pretty(&outcome)?)
            };
            write().with_context(|| directory.display().to_string())?;
        }
        if self.json {
            writeln!(out, "{}", serde_json::to_string_pretty(&outcome)?)?;
        } else {
            write!(out, "{outcome}")?;
        }
        Ok(match (outcome.as_expected(), outcome.missing_servers.is_empty()) {
            (false, _) => ExitCode::FAILURE,
            (true, false) => ExitCode::from(SERVER_MISSING),
            (true, true) => ExitCode::SUCCESS,
        })
    }
}

fn unknown(name: &str) -> anyhow::Error {
    anyhow!("there is no version or family {name:?}; `stampede lab --list` lists them")
}

fn list() -> String {
    let mut text = String::new();
    for family in Family::ALL {
        let (english, chinese) = family.title();
        text.push_str(&format!("{}: {english} · {chinese}\n", family.name()));
        for version in registry::all().filter(|version| version.family == *family) {
            let expected = match version.expected {
                Expected::Sound => "sound".to_owned(),
                Expected::Flawed(flaw) => flaw.name().to_owned(),
            };
            text.push_str(&format!("  {:<36} {expected:<11} {}\n", version.name, version.title()));
        }
    }
    text
}

/// Shows the version that runs, and prints each result as it comes, on standard error.
struct Bar {
    bar: ProgressBar,
    quiet: bool,
}

impl Bar {
    fn new(quiet: bool) -> Self {
        if quiet || !std::io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden(), quiet };
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed_precise} {bar:20} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        Self { bar, quiet }
    }
}

impl Progress for Bar {
    fn started(&self, version: &Version, index: usize, count: usize) {
        self.bar.set_length(count as u64);
        self.bar.set_position(index as u64);
        self.bar.set_message(version.name);
    }

    fn finished(&self, result: &VersionResult) {
        if self.bar.is_hidden() && !self.quiet {
            eprintln!("{:<36} {:<8} {:>5.1} s", result.name, verdict(result), result.seconds);
        } else {
            self.bar.println(table::lines(result));
        }
    }
}
