//! Runs versions, and compares what comes out with what is expected.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::measured::Measured;
use crate::race::RacePoint;
use crate::servers::{ServerKind, Servers, StartError};
use crate::site::Site;
use crate::tiers::PrepareNode;
use crate::version::{Expected, Family, Version};

/// How long one version may take: a part for its races and crashes, and one for its load. The slowest versions, in which the row of the stock
/// is locked for each buyer in turn, need some milliseconds per buyer.
const VERSION_TIMEOUT: Duration = Duration::from_secs(90);
const TIMEOUT_PER_BUYER: Duration = Duration::from_millis(20);
/// How often a flawed version is run until its flaw shows: the race may be missed, or the machine too slow for a step of the run.
const ATTEMPTS: u32 = 3;

#[derive(Debug, Clone)]
pub struct Options {
    /// Buyers of the load.
    pub buyers: u64,
    /// Stock of the load.
    pub stock: u64,
    pub seed: u64,
    /// Prepares the nodes of the tiers. `None` where the server is not available: the tiers end with an error.
    pub prepare_node: Option<PrepareNode>,
}

/// What versions are run with.
#[derive(Debug)]
pub struct Lab {
    pub options: Options,
    /// The number of this attempt, from zero, and its seed.
    pub attempt: u32,
    pub seed: u64,
    pub servers: Servers,
    sites: AtomicU64,
}

impl Lab {
    /// A name that no other database or queue has.
    pub(crate) fn next_name(&self) -> String {
        format!("lab_{}", self.sites.fetch_add(1, Ordering::Relaxed))
    }

    /// Fresh tables and keys.
    pub async fn site(&self, version: &Version, stock: u64, race: RacePoint) -> Result<Site> {
        let name = self.next_name();
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
    /// Whether the verdict and the flaw are those that are expected; `None` if it was skipped.
    pub as_expected: Option<bool>,
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
    /// Processors of the machine, and whether the program was built without optimization.
    pub processors: usize,
    pub debug_build: bool,
    pub seconds: f64,
    pub versions: Vec<VersionResult>,
    /// Servers that are not installed, whose versions were skipped.
    pub missing_servers: Vec<ServerKind>,
}

impl Outcome {
    /// Whether every version that ran came out as expected.
    pub fn as_expected(&self) -> bool {
        self.unexpected().next().is_none()
    }

    /// The versions that ran and came out otherwise.
    pub fn unexpected(&self) -> impl Iterator<Item = &VersionResult> {
        self.versions.iter().filter(|result| result.as_expected == Some(false))
    }

    /// How many versions came out as expected, of those that ran, and how many were skipped.
    pub fn summary(&self) -> String {
        let skipped = self.versions.iter().filter(|result| result.as_expected.is_none()).count();
        let ran = self.versions.len() - skipped;
        let expected = ran - self.unexpected().count();
        let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
        format!("{expected} of {ran} versions as expected{skipped}, in {:.0} s", self.seconds)
    }

    /// Names all servers that are not installed, and the command that installs them.
    pub fn missing(&self) -> Option<String> {
        let join = |names: fn(ServerKind) -> &'static str, separator| {
            self.missing_servers.iter().map(|kind| names(*kind)).collect::<Vec<_>>().join(separator)
        };
        (!self.missing_servers.is_empty()).then(|| {
            let (names, packages) = (join(ServerKind::name, ", "), join(ServerKind::package, " "));
            format!("not installed: {names}; on Debian and Ubuntu: sudo apt-get install {packages}")
        })
    }
}

/// Runs the versions one after another.
pub async fn run(options: Options, versions: &[&'static Version], progress: &dyn Progress) -> Outcome {
    let mut lab =
        Lab { attempt: 0, seed: options.seed, options, servers: Servers::default(), sites: AtomicU64::new(0) };
    let begin = Instant::now();
    let is_needed = |kind: &ServerKind| versions.iter().any(|version| version.needs.contains(kind));
    // RabbitMQ takes ten seconds, in which nothing is measured.
    lab.servers.start_all(ServerKind::ALL.iter().copied().filter(is_needed)).await;
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
    let (processors, debug_build) =
        (std::thread::available_parallelism().map_or(1, usize::from), cfg!(debug_assertions));
    Outcome { seed, buyers, stock, processors, debug_build, seconds, versions: results, missing_servers: missing }
}

async fn run_version(lab: &mut Lab, version: &'static Version, missing: &mut Vec<ServerKind>) -> VersionResult {
    let mut not_installed = Vec::new();
    for &kind in version.needs {
        match lab.servers.start(kind).await {
            Ok(()) => {}
            Err(StartError::NotInstalled(kind)) => not_installed.push(kind),
            Err(StartError::Other(error)) => return VersionResult::error(version, &error),
        }
    }
    if !not_installed.is_empty() {
        let names: Vec<_> = not_installed.iter().map(|kind| kind.name()).collect();
        let reason = format!("not installed: {}", names.join(", "));
        not_installed.retain(|kind| !missing.contains(kind));
        missing.append(&mut not_installed);
        return VersionResult::new(version, Verdict::Skipped, reason, None);
    }
    lab.attempt = 0;
    loop {
        lab.seed = lab.options.seed.wrapping_add(lab.attempt.into());
        let ran = tokio::time::timeout(version_timeout(lab.options.buyers), (version.run)(lab, version)).await;
        let Ok(ran) = ran else {
            // It hangs, and another attempt would take as long.
            return VersionResult::error(version, &Error::TimedOut("the run of the version"));
        };
        let is_repeatable = matches!(ran, Ok(_) | Err(Error::TimedOut(_)));
        let result = match ran {
            Ok(measured) => VersionResult::judged(version, measured),
            Err(error) => VersionResult::error(version, &error),
        };
        // A sound version has one attempt: any flaw counts.
        let is_last = version.expected == Expected::Sound || lab.attempt + 1 == ATTEMPTS;
        if result.as_expected == Some(true) || is_last || !is_repeatable {
            return result;
        }
        lab.attempt += 1;
    }
}

fn version_timeout(buyers: u64) -> Duration {
    VERSION_TIMEOUT + TIMEOUT_PER_BUYER.saturating_mul(u32::try_from(buyers).unwrap_or(u32::MAX))
}

impl VersionResult {
    fn new(version: &Version, verdict: Verdict, reason: String, measured: Option<Measured>) -> Self {
        let expected = match version.expected {
            Expected::Sound => "sound",
            Expected::Flawed(flaw) => flaw.name(),
        };
        let as_expected = match (&measured, version.expected) {
            (None, _) if verdict == Verdict::Skipped => None,
            (None, _) => Some(false),
            (Some(measured), Expected::Sound) => Some(measured.flaws.is_empty()),
            (Some(measured), Expected::Flawed(flaw)) => Some(measured.has(flaw)),
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

#[cfg(test)]
mod tests {
    use Attempt::{Broken, Failed, Held, TimedOut};
    use parking_lot::Mutex;

    use super::*;
    use crate::measured::Flaw;
    use crate::registry;
    use crate::report::verdict;

    /// What an attempt of a fake version comes to.
    #[derive(Debug, Clone, Copy)]
    enum Attempt {
        Held,
        Failed,
        TimedOut,
        Broken,
    }

    const FAKE: Version = Version {
        name: "stock/fake",
        family: Family::Stock,
        expected: Expected::Flawed(Flaw::Lost),
        because: "it is a fake",
        needs: &[],
        source: "//! A fake.\n",
        story_zh: "",
        run: |lab, _| Box::pin(attempt(lab, &[Failed])),
    };
    const SOUND: Version = Version { expected: Expected::Sound, ..FAKE };

    /// Versions that need no server, the seeds of their attempts, the verdict, and whether it is as expected. One attempt more would panic.
    const CASES: &[(Version, &[u64], Verdict, bool)] = &[
        (FAKE, &[7], Verdict::Failed, true),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[Held, Failed])), ..FAKE }, &[7, 8], Verdict::Failed, true),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[Held; 3])), ..FAKE }, &[7, 8, 9], Verdict::Held, false),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[TimedOut, Failed])), ..FAKE }, &[7, 8], Verdict::Failed, true),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[TimedOut; 3])), ..FAKE }, &[7, 8, 9], Verdict::Error, false),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[Broken])), ..FAKE }, &[7], Verdict::Error, false),
        (SOUND, &[7], Verdict::Failed, false),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[Held])), ..SOUND }, &[7], Verdict::Held, true),
        (Version { run: |lab, _| Box::pin(attempt(lab, &[TimedOut])), ..SOUND }, &[7], Verdict::Error, false),
    ];

    /// The seeds of all attempts of the version that runs.
    static SEEDS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

    async fn attempt(lab: &Lab, attempts: &[Attempt]) -> Result<Measured> {
        SEEDS.lock().push(lab.seed);
        let mut measured = Measured::default();
        match attempts[usize::try_from(lab.attempt).unwrap()] {
            Held => {}
            Failed => measured.count(Flaw::Lost, 1, |count| format!("{count} lost")),
            TimedOut => return Err(Error::TimedOut("a step")),
            Broken => return Err(Error::Failed("broken".to_owned())),
        }
        Ok(measured)
    }

    struct NoProgress;

    impl Progress for NoProgress {
        fn started(&self, _: &Version, _: usize, _: usize) {}
        fn finished(&self, _: &VersionResult) {}
    }

    #[tokio::test]
    async fn only_a_flawed_version_is_repeated_and_only_until_its_flaw_shows() {
        for (version, seeds, expected, as_expected) in CASES {
            let options = Options { buyers: 16, stock: 8, seed: 7, prepare_node: None };
            let outcome = run(options, &[version], &NoProgress).await;
            let result = &outcome.versions[0];
            let made = std::mem::take(&mut *SEEDS.lock());
            assert_eq!((made.as_slice(), result.verdict), (*seeds, *expected), "{result:#?}");
            assert_eq!((result.as_expected, outcome.as_expected()), (Some(*as_expected), *as_expected), "{result:#?}");
        }
    }

    #[test]
    fn a_flaw_that_does_not_show_is_not_as_expected() {
        let flawed = registry::all().find(|version| version.expected == Expected::Flawed(Flaw::Overload)).unwrap();
        let result = VersionResult::judged(flawed, Measured::default());
        assert_eq!((result.verdict, result.as_expected, verdict(&result)), (Verdict::Held, Some(false), "HOLDS?"));
        assert_eq!(result.reason, "the expected flaw did not show in 3 runs");

        let mut other = Measured::default();
        other.count(Flaw::Lost, 1, |count| format!("{count} lost"));
        let result = VersionResult::judged(flawed, other);
        assert_eq!((result.verdict, result.as_expected, verdict(&result)), (Verdict::Failed, Some(false), "FAILS!"));
        assert_eq!(result.reason, "1 lost");
    }

    #[test]
    fn a_sound_version_with_a_flaw_is_not_as_expected() {
        let sound = registry::all().find(|version| version.expected == Expected::Sound).unwrap();
        let held = VersionResult::judged(sound, Measured::default());
        assert_eq!((held.verdict, held.as_expected, held.reason.as_str()), (Verdict::Held, Some(true), sound.because));

        let mut measured = Measured::default();
        measured.count(Flaw::Oversold, 2, |count| format!("{count} too many"));
        let result = VersionResult::judged(sound, measured);
        assert_eq!((result.verdict, result.as_expected, verdict(&result)), (Verdict::Failed, Some(false), "FAILS!"));
    }
}
