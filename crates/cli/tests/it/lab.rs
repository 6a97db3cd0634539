//! `stampede lab`: what the command prints, its exit codes, and the tiers. The other versions are run by the tests of `stampede-lab`.

use std::process::{Command, Output};

use stampede_testkit::count;

fn lab(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stampede")).arg("lab").args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn versions_are_listed_and_explained_in_two_languages() {
    let list = stdout(&lab(&["--list"]));
    for name in ["stock/no-check", "locks/red-lock", "queues/stream-group", "reads/two-levels", "tiers/shielded"] {
        assert!(list.contains(name), "{name} is not in\n{list}");
    }
    let story = stdout(&lab(&["--explain", "stock/not-negative"]));
    for part in ["Adds: ", "Wrong: ", "Next: ", "库存为零"] {
        assert!(story.contains(part), "{part:?} is not in\n{story}");
    }
    let unknown = lab(&["--only", "stock/nothing"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("stock/nothing"), "{unknown:?}");
}

#[test]
fn one_version_runs_alone_with_json_and_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let output = lab(&["--only", "limits/sliding-window", "--buyers", "100", "--json", "--report", path]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let versions = json["versions"].as_array().unwrap();
    assert_eq!(versions.len(), 1, "{json}");
    assert_eq!(versions[0]["name"], "limits/sliding-window");
    assert_eq!((versions[0]["verdict"].as_str(), &versions[0]["as_expected"]), (Some("held"), &true.into()), "{json}");
    assert!(versions[0]["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{json}");
    let page = std::fs::read_to_string(directory.path().join("lab.html")).unwrap();
    // A chart, the result, the source and the story in Chinese.
    for part in ["<svg", "holds", "ZREMRANGEBYSCORE", "有序集合"] {
        assert!(page.contains(part), "{part} is not in the page");
    }
    assert!(!page.contains("src=") && !page.contains("<link"), "the page needs other files");
}

#[test]
fn a_server_that_is_not_installed_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    let output = command.args(["lab", "--only", "limits/no-limit"]).env("PATH", "/nonexistent").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("skipped") && text.contains("Redis is not installed"), "{text}");
}

#[test]
fn tiers_hold() {
    // Each takes a quarter of a minute, and `stampede bench` has tests of its own.
    let only = if count(1, 0) == 1 { "tiers" } else { "tiers/solo" };
    for seed in 1..=count(20, 1) {
        let output = lab(&["--only", only, "--buyers", "500", "--stock", "50", "--seed", &seed.to_string(), "--json"]);
        assert!(output.status.success(), "seed {seed}: {output:?}");
    }
}
