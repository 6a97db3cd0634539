//! `stampede lab`: the known versions of a flash sale, flawed and sound, run and measured side by side.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use stampede_lab::report::markdown::{self, Language};
use stampede_lab::report::{html, table, verdict};
use stampede_lab::run::Outcome;
use stampede_lab::tiers::{NodeCommand, TierNode};
use stampede_lab::{Expected, Family, Options, Progress, Version, VersionResult, registry};
use tokio::signal::unix::{SignalKind, signal};

use crate::bench::node_command;

/// A version came out otherwise than expected, or could not be run.
const UNEXPECTED: u8 = 1;
/// A server is not installed, so some versions did not run; the others came out as expected.
const SERVER_MISSING: u8 = 2;
/// A signal ended the run; the code that shells give to SIGINT.
const INTERRUPTED: u8 = 130;
/// How long a server that is being started may take to end after a signal.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug, Args)]
pub struct Lab {
    /// Run only these versions or families
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,

    /// List the versions with what is expected of them
    #[arg(long, conflicts_with_all = ["only", "explain"])]
    list: bool,

    /// Print the story of a version, or of each version of a family, in English and Chinese, and run nothing
    #[arg(long, value_name = "NAME", conflicts_with = "only")]
    explain: Option<String>,

    /// Number of buyers in the load of each version
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(16..=1_000_000))]
    buyers: u64,

    /// Stock in the load of each version; at most half the number of buyers, so that it is sold out
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

    /// Write the figures of the report into lab.md, lab.zh-CN.md and lab.svg of this directory, and run nothing
    #[arg(long, value_name = "DIR", requires = "report", hide = true)]
    update_docs: Option<PathBuf>,
}

impl Lab {
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let mut out = std::io::stdout().lock();
        if let Some(name) = &self.explain {
            write!(out, "{}", explain(name)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        if self.list {
            write!(out, "{}", list())?;
            return Ok(ExitCode::SUCCESS);
        }
        if let (Some(docs), Some(report)) = (&self.update_docs, &self.report) {
            update_docs(docs, report)?;
            return Ok(ExitCode::SUCCESS);
        }
        let versions = registry::select(&self.only).map_err(|name| unknown(&name))?;
        if self.stock > self.buyers / 2 {
            bail!(
                "--stock {} is above half of --buyers {}: the sale would not be sold out for most of the load",
                self.stock,
                self.buyers
            );
        }
        // Found out now, not after minutes.
        if let Some(directory) = &self.report {
            writable(directory).with_context(|| format!("cannot write to {}", directory.display()))?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let progress = Bar::new(self.json);
        let outcome = runtime.block_on(self.run_versions(&versions, &progress));
        progress.bar.finish_and_clear();
        runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
        let Some(outcome) = outcome? else { return Ok(ExitCode::from(INTERRUPTED)) };
        if let Some(directory) = &self.report {
            write_report(&outcome, directory).with_context(|| directory.display().to_string())?;
        }
        if self.json {
            writeln!(out, "{}", serde_json::to_string_pretty(&outcome)?)?;
            if let Some(missing) = outcome.missing() {
                eprintln!("stampede: {missing}");
            }
        } else {
            write!(out, "{outcome}")?;
        }
        Ok(ExitCode::from(exit_code(&outcome)))
    }

    /// Returns `None` after SIGINT or SIGTERM. What was started is stopped then, and its data is removed.
    async fn run_versions(&self, versions: &[&'static Version], bar: &Bar) -> anyhow::Result<Option<Outcome>> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let options =
            Options { buyers: self.buyers, stock: self.stock, seed: self.seed, prepare_node: Some(prepare_node) };
        tokio::select! {
            outcome = stampede_lab::run(options, versions, bar) => Ok(Some(outcome)),
            _ = interrupt.recv() => Ok(None),
            _ = terminate.recv() => Ok(None),
        }
    }
}

/// The exit code of a run. A version that came out otherwise counts for more than a server that is not installed.
fn exit_code(outcome: &Outcome) -> u8 {
    match (outcome.as_expected(), outcome.missing_servers.is_empty()) {
        (false, _) => UNEXPECTED,
        (true, false) => SERVER_MISSING,
        (true, true) => 0,
    }
}

/// A node of a tier, as `stampede bench` starts it.
fn prepare_node(node: &TierNode) -> std::io::Result<NodeCommand> {
    // A lab has few buyers, who try often: the limit per user is raised.
    let command = node_command(node.data_dir.clone(), &node.token, 0).map_err(std::io::Error::other)?;
    let mut command = command.arg("--tier", node.tier).arg("--database", &node.database);
    if let Some(redis) = &node.redis {
        command = command.arg("--redis", redis);
    }
    Ok(Box::new(move |listen| command.command(listen)))
}

fn writable(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    tempfile::tempfile_in(directory).map(drop)
}

fn write_report(outcome: &Outcome, directory: &Path) -> anyhow::Result<()> {
    std::fs::write(directory.join("lab.html"), html::page(outcome))?;
    std::fs::write(directory.join("lab.json"), serde_json::to_string_pretty(outcome)?)?;
    Ok(())
}

/// Writes the figures of a report into the documentation.
fn update_docs(docs: &Path, report: &Path) -> anyhow::Result<()> {
    let path = report.join("lab.json");
    let read = |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    let run: serde_json::Value = serde_json::from_str(&read(&path)?).with_context(|| path.display().to_string())?;
    for (name, language) in [("lab.md", Language::English), ("lab.zh-CN.md", Language::Chinese)] {
        let path = docs.join(name);
        let updated =
            markdown::update(&read(&path)?, &run, language).map_err(|why| anyhow!("{}: {why}", path.display()))?;
        std::fs::write(&path, updated).with_context(|| path.display().to_string())?;
    }
    let (path, chart) = (docs.join("lab.svg"), markdown::chart(&run).map_err(|why| anyhow!(why))?);
    std::fs::write(&path, chart).with_context(|| path.display().to_string())
}

/// The story of a version, or the stories of a family.
fn explain(name: &str) -> anyhow::Result<String> {
    let versions = registry::select(&[name.to_owned()]).map_err(|name| unknown(&name))?;
    let mut text = String::new();
    if let Some(family) = Family::ALL.iter().find(|family| family.name() == name) {
        let (english, chinese) = family.title();
        text.push_str(&format!("{name}: {english} · {chinese}\n\n"));
    }
    let story = |version: &&Version| format!("{}\n{}\n{}\n", version.name, version.story(), version.story_zh);
    text.push_str(&versions.iter().map(story).collect::<Vec<_>>().join("\n"));
    Ok(text)
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
        bar.set_message("starting the servers");
        bar.enable_steady_tick(Duration::from_millis(250));
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

#[cfg(test)]
mod tests {
    use stampede_lab::run::Verdict;
    use stampede_lab::servers::ServerKind;

    use super::*;

    /// What was expected of a version, what came out, and whether that is the same.
    type Case = (&'static str, Verdict, Option<bool>);

    const FAILED: Case = ("oversold", Verdict::Failed, Some(true));
    const HELD: Case = ("sound", Verdict::Held, Some(true));
    const SKIPPED: Case = ("sound", Verdict::Skipped, None);
    /// A flawed version that held, a sound one that failed, and one that could not be run.
    const SURPRISES: [Case; 3] = [
        ("oversold", Verdict::Held, Some(false)),
        ("sound", Verdict::Failed, Some(false)),
        ("sound", Verdict::Error, Some(false)),
    ];

    fn exit_code_of(cases: &[Case]) -> u8 {
        let result = |&(expected, verdict, as_expected): &Case| VersionResult {
            name: "stock/fake",
            family: Family::Stock,
            title: "A fake".to_owned(),
            expected,
            verdict,
            as_expected,
            reason: "it is a fake".to_owned(),
            seconds: 0.0,
            measured: None,
        };
        let is_skipped = cases.iter().any(|(_, verdict, _)| *verdict == Verdict::Skipped);
        exit_code(&Outcome {
            seed: 1,
            buyers: 16,
            stock: 8,
            processors: 1,
            debug_build: true,
            seconds: 0.0,
            versions: cases.iter().map(result).collect(),
            missing_servers: if is_skipped { vec![ServerKind::Redis] } else { Vec::new() },
        })
    }

    #[test]
    fn the_exit_code_tells_surprises_from_missing_servers() {
        assert_eq!(exit_code_of(&[FAILED, HELD]), 0);
        assert_eq!(exit_code_of(&[FAILED, SKIPPED, HELD]), 2);
        assert_eq!(exit_code_of(&[SKIPPED]), 2);
        for surprise in SURPRISES {
            assert_eq!(exit_code_of(&[FAILED, surprise, HELD]), 1, "{surprise:?}");
            assert_eq!(exit_code_of(&[SKIPPED, surprise, HELD]), 1, "{surprise:?}");
        }
    }
}
