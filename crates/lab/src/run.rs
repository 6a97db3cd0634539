//! Runs versions, and compares what comes out with what is expected.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::measured::Measured;
use crate::race::RacePoint;
use crate::servers::{ServerKind, Servers, StartError};
use crate::site::Site;
use crate::version::{Expected, Family, Version};

/// How long one version may take.
const VERSION_TIMEOUT: Duration = Duration::from_secs(90);
/// How often a flawed version is run until its flaw shows.
const ATTEMPTS: u64 = 3;

#[derive(Debug, Clone)]
pub struct Options {
    /// Buyers of the load.
    pub buyers: u64,
    /// Stock of the load.
    pub stock: u64,
    pub seed: u64,
    /// The program `stampede`, whose tiers are measured.
    pub program: Option<PathBuf>,
}

/// What versions are run with.
#[derive(Debug)]
pub struct Lab {
    pub options: Options,
    /// The seed of this attempt.
    pub seed: u64,
    pub servers: Servers,
    sites: AtomicU64,
}

impl Lab {
    /// Fresh tables and keys.
    pub async fn site(&self, version: &Version, stock: u64, race: RacePoint) -> Result<Site> {
        let name = format!("lab_{}", self.sites.fetch_add(1, Ordering::Relaxed));
        Site::create(&self.servers, version.needs, &name, stock, race).await
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No flaw was seen.
    Held,
    /// A flaw was seen.
    Failed,
    /// A server that it needs is not installed.
    Skipped,
    /// It could not be run to its end.
    Error,
}

#[derive(Debug, Serialize)]
pub struct VersionResult {
    pub name: &'static str,
    pub family: Family,
    pub title: String,
    /// `sound`, or the flaw that must show.
    pub expected: &'static str,
    pub verdict: Verdict,
    /// Whether the verdict and the flaw are those that are expected.
    pub as_expected: bool,
    /// The reason for the verdict in one line.
    pub reason: String,
    pub seconds: f64,
    #[serde(flatten)]
    pub measured: Option<Measured>,
}

/// Follows a run.
pub trait Progress {
    fn started(&self, version: &Version, index: usize, count: usize);
    fn finished(&self, result: &VersionResult);
}

#[derive(Debug, Serialize)]
pub struct Outcome {
    pub seed: u64,
    pub buyers: u64,
    pub stock: u64,
    pub seconds: f64,
    pub versions: Vec<VersionResult>,
    /// Servers that are not installed, whose versions were skipped.
    pub missing_servers: Vec<ServerKind>,
}

impl Outcome {
    /// Whether every version that ran came out as expected.
    pub fn as_expected(&self) -> bool {
        self.versions.iter().all(|result| result.as_expected || result.verdict == Verdict::Skipped)
    }
}

/// Runs the versions one after another.
pub async fn run(options: Options, versions: &[&'static Version], progress: &dyn Progress) -> Outcome {
    let mut lab = Lab { seed: options.seed, options, servers: Servers::default(), sites: AtomicU64::new(0) };
    if versions.iter().any(|version| version.needs.contains(&ServerKind::RabbitMq)) {
        lab.servers.start_rabbitmq_early();
    }
    let begin = Instant::now();
    let (mut results, mut missing) = (Vec::new(), Vec::new());
    for (index, version) in versions.iter().enumerate() {
        progress.started(version, index, versions.len());
        let begin = Instant::now();
        let mut result = run_version(&mut lab, version, &mut missing).await;
        result.seconds = begin.elapsed().as_secs_f64();
        progress.finished(&result);
        results.push(result);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let Options { buyers, stock, seed, .. } = lab.options;
    Outcome { seed, buyers, stock, seconds, versions: results, missing_servers: missing }
}

async fn run_version(lab: &mut Lab, version: &'static Version, missing: &mut Vec<ServerKind>) -> VersionResult {
    for &kind in version.needs {
        match lab.servers.start(kind).await {
            Ok(()) => {}
            Err(StartError::NotInstalled(kind)) => {
                if !missing.contains(&kind) {
                    missing.push(kind);
                }
                let reason = format!("{} is not installed (package {})", kind.name(), kind.package());
                return VersionResult::new(version, Verdict::Skipped, reason, None);
            }
            Err(StartError::Other(error)) => return VersionResult::error(version, &error),
        }
    }
    let mut attempt = 0;
    loop {
        lab.seed = lab.options.seed.wrapping_add(attempt);
        attempt += 1;
        let ran = tokio::time::timeout(VERSION_TIMEOUT, (version.run)(lab, version)).await;
        let result = match ran.unwrap_or(Err(Error::TimedOut("the run of the version"))) {
            Ok(measured) => VersionResult::judged(version, measured),
            Err(error) => return VersionResult::error(version, &error),
        };
        // A sound version has one attempt: any flaw counts.
        if result.as_expected || version.expected == Expected::Sound || attempt == ATTEMPTS {
            return result;
        }
    }
}

impl VersionResult {
    fn new(version: &Version, verdict: Verdict, reason: String, measured: Option<Measured>) -> Self {
        let expected = match version.expected {
            Expected::Sound => "sound",
            Expected::Flawed(flaw) => flaw.name(),
        };
        let as_expected = match (&measured, version.expected) {
            (None, _) => false,
            (Some(measured), Expected::Sound) => measured.flaws.is_empty(),
            (Some(measured), Expected::Flawed(flaw)) => measured.has(flaw),
        };
        let (name, family, title) = (version.name, version.family, version.title());
        Self { name, family, title, expected, verdict, as_expected, reason, seconds: 0.0, measured }
    }

    fn error(version: &Version, error: &Error) -> Self {
        Self::new(version, Verdict::Error, error.to_string(), None)
    }

    fn judged(version: &Version, measured: Measured) -> Self {
        let expected = |(flaw, _): &&(_, _)| version.expected == Expected::Flawed(*flaw);
        let shown = measured.flaws.iter().find(expected).or(measured.flaws.first());
        let (verdict, reason) = match shown {
            Some((flaw, seen)) if version.expected == Expected::Flawed(*flaw) => {
                (Verdict::Failed, format!("{seen}; {}", version.because))
            }
            Some((_, seen)) => (Verdict::Failed, seen.clone()),
            None if version.expected == Expected::Sound => (Verdict::Held, version.because.to_owned()),
            None => (Verdict::Held, format!("the expected flaw did not show in {ATTEMPTS} runs")),
        };
        Self::new(version, verdict, reason, Some(measured))
    }
}
