//! The four tiers of Stampede itself, measured by `stampede bench` over HTTP with a private MariaDB.
//!
//! In order: [`solo`], [`shared`], [`queued`], [`shielded`].

pub mod queued;
pub mod shared;
pub mod shielded;
pub mod solo;

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::error::{Error, Result};
use crate::measured::{Flaw, Measured};
use crate::run::Lab;
use crate::version::Version;

pub const VERSIONS: &[&Version] = &[&solo::VERSION, &shared::VERSION, &queued::VERSION, &shielded::VERSION];

/// How long a benchmark may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a short benchmark of a tier and takes over its figures and violations.
async fn bench(lab: &Lab, tier: &str) -> Result<Measured> {
    let program = lab.options.program.as_ref().ok_or_else(|| Error::Failed("the program is not known".to_owned()))?;
    let directory = tempfile::tempdir()?;
    let mut command = Command::new(program);
    command
        .args(["bench", "--tier", tier, "--private-servers", "--database", "mariadb", "--json"])
        .args(["--seconds", "1", "--storm-seconds", "1", "--seed", &lab.seed.to_string()])
        .args(["--buyers", &lab.options.buyers.to_string(), "--stock", &lab.options.stock.to_string()])
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output =
        tokio::time::timeout(TIMEOUT, command.output()).await.map_err(|_| Error::TimedOut("the benchmark"))??;
    let report: Value = serde_json::from_slice(&output.stdout).map_err(|_| {
        Error::Failed(format!("the benchmark failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
    })?;
    let mut measured = Measured {
        orders_per_s: report["orders"]["per_s"].as_f64(),
        p99_ms: report["latency_ms"]["order"]["p99"].as_f64(),
        requests: report["orders"]["count"].as_u64().unwrap_or_default(),
        ..Measured::default()
    };
    if let Some(refusals) = report["refusals"]["per_s"].as_f64() {
        measured.figures.push(("refusals per second", refusals));
    }
    let storm = |name: &str| report["storm"][name].as_u64().unwrap_or_default();
    for (flaw, name) in [
        (Flaw::Oversold, "oversold"),
        (Flaw::Undersold, "undersold"),
        (Flaw::Duplicated, "duplicated"),
        (Flaw::Lost, "lost"),
    ] {
        measured.count(flaw, storm(name), |count| format!("{count} {name} in the storm"));
    }
    let violations = report["violations"].as_array().map_or(1, Vec::len);
    if violations > 0 && measured.flaws.is_empty() {
        measured.flaws.push((Flaw::Lost, format!("violations: {}", report["violations"])));
    }
    Ok(measured)
}
