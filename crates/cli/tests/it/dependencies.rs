//! `make deps`: `scripts/check-advisories` with a script in storage of cargo-deny.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the script with a `cargo` that fetches and checks with these exit codes.
fn check(home: &Path, fetch: u8, check: u8) -> Output {
    let cargo = home.join("cargo");
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in\n'deny fetch db') exit {fetch} ;;\n\
         'deny check --disable-fetch advisories') echo checked; exit {check} ;;\n*) echo \"unexpected: $*\"; exit 9 ;;\nesac\n"
    );
    std::fs::write(&cargo, text).unwrap();
    std::fs::set_permissions(&cargo, Permissions::from_mode(0o755)).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/check-advisories");
    Command::new(script).env("CARGO", &cargo).env("CARGO_HOME", home).output().unwrap()
}

#[test]
fn advisories_are_checked_if_a_database_is_available() {
    let home = tempfile::tempdir().unwrap();
    let checked = |output: &Output| String::from_utf8_lossy(&output.stdout).contains("checked");
    // The database was fetched: the exit code is that of the check.
    for (findings, code) in [(0, 0), (1, 1)] {
        let output = check(home.path(), 0, findings);
        assert!(checked(&output) && output.status.code() == Some(code), "{output:?}");
    }
    // Neither fetched nor cached: a message, and exit code 0.
    let output = check(home.path(), 1, 1);
    assert!(!checked(&output) && output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("NOT checked"), "{output:?}");
    // A cached copy is used.
    std::fs::create_dir_all(home.path().join("advisory-dbs/advisory-db-1")).unwrap();
    let output = check(home.path(), 1, 1);
    assert!(checked(&output) && output.status.code() == Some(1), "{output:?}");
}
