//! Every flawed version is seen to fail with its flaw, and every sound one holds: with one seed, or with 20 if `SOAK` is set.

use stampede_lab::{Family, Options, Progress, Version, VersionResult, registry, run};
use stampede_testkit::count;

struct Names;

impl Progress for Names {
    fn started(&self, _: &Version, _: usize, _: usize) {}

    fn finished(&self, result: &VersionResult) {
        eprintln!("{} {:?} {:.1} s: {}", result.name, result.verdict, result.seconds, result.reason);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_version_comes_out_as_expected() {
    // The tiers need the program, which only the tests of `stampede-cli` have.
    let versions: Vec<_> = registry::all().filter(|version| version.family != Family::Tiers).collect();
    for seed in 1..=count(20, 1) {
        let outcome = run(Options { buyers: 300, stock: 30, seed, program: None }, &versions, &Names).await;
        let unexpected: Vec<_> = outcome.versions.iter().filter(|result| !result.as_expected).collect();
        assert!(unexpected.is_empty(), "seed {seed}: {unexpected:#?}");
    }
}
