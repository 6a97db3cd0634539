//! `stampede lab`: what the command prints, its exit codes, and the tiers. The other versions are run by the tests of `stampede-lab`.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::RwLock;
use std::time::{Duration, Instant};

use stampede_lab::registry;
use stampede_lab::tiers::{AFTER_KILL, BEFORE_KILL, LOST};
use stampede_proof::process::pause;
use stampede_testkit::count;

/// Runs whose time is measured have the machine for themselves, as far as this module is concerned; the others share it.
static MACHINE: RwLock<()> = RwLock::new(());

fn lab(arguments: &[&str]) -> Output {
    let _shared = MACHINE.read().unwrap();
    Command::new(env!("CARGO_BIN_EXE_stampede")).arg("lab").args(arguments).output().unwrap()
}

/// Also returns how long the command has taken, the end of its servers included.
fn lab_alone(arguments: &[&str]) -> (Output, Duration) {
    let _alone = MACHINE.write().unwrap();
    let begin = Instant::now();
    let output = Command::new(env!("CARGO_BIN_EXE_stampede")).arg("lab").args(arguments).output().unwrap();
    (output, begin.elapsed())
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
    let family = stdout(&lab(&["--explain", "stock"]));
    for part in ["库存不超卖", "stock/no-check", "stock/above-zero", "Wrong: ", "问题："] {
        assert!(family.contains(part), "{part:?} is not in\n{family}");
    }
    for unknown in [&["--only", "stock", "stock/nothing"][..], &["--explain", "stock/nothing"]] {
        let output = lab(unknown);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("no version or family \"stock/nothing\"") && error.contains("--list"), "{error}");
    }
}

/// The names of packages that `cargo tree` prints.
fn tree(arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(["tree", "--locked", "--offline", "--prefix", "none"]);
    let names = stdout(&command.args(arguments).output().unwrap());
    names.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// Only the command `lab` has it, and the program without that feature has nothing of it.
#[test]
fn nothing_but_the_command_depends_on_the_lab() {
    let program = ["-p", "stampede-cli", "-e", "normal"];
    assert!(tree(&program).iter().any(|name| name == "stampede-lab"), "the feature is on by default");
    let without = tree(&[&program[..], &["--no-default-features"]].concat());
    assert!(without.iter().any(|name| name == "stampede-engine"), "{without:?}");
    assert!(without.iter().all(|name| name != "stampede-lab"), "{without:?}");
    let dependents = tree(&["--workspace", "--invert", "stampede-lab", "--depth", "1", "-e", "normal,build,dev"]);
    assert_eq!(dependents, ["stampede-lab", "stampede-cli"]);
}

#[test]
fn one_version_runs_alone_with_json_and_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let output =
        lab(&["--only", "limits/sliding-window", "--buyers", "100", "--stock", "10", "--json", "--report", path]);
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
fn servers_that_are_not_installed_are_named_together() {
    let without_servers = |arguments: &[&str]| {
        let _shared = MACHINE.read().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        let output = command.arg("lab").args(arguments).env("PATH", "/nonexistent").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let named = "not installed: MariaDB, Redis, RabbitMQ; on Debian and Ubuntu: \
        sudo apt-get install mariadb-server redis-server rabbitmq-server";
    let only = ["--only", "queues/rabbitmq-early-ack", "limits/no-limit"];
    let (table, _) = without_servers(&only);
    assert!(table.contains("skipped") && table.contains(named), "{table}");
    assert!(table.contains("0 of 0 versions as expected, 2 skipped"), "{table}");
    assert!(!table.contains("not as expected"), "{table}");
    let (json, stderr) = without_servers(&[&only[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let skipped = ("skipped".into(), serde_json::Value::Null);
    for version in json["versions"].as_array().unwrap() {
        assert_eq!((version["verdict"].clone(), version["as_expected"].clone()), skipped, "{json}");
    }
    assert_eq!(json["missing_servers"], serde_json::json!(["mariadb", "redis", "rabbitmq"]));
    assert!(stderr.contains(named), "{stderr}");
}

/// A directory that has these programs and no others.
fn directory_with(programs: &[&str]) -> tempfile::TempDir {
    let (directory, path) = (tempfile::tempdir().unwrap(), std::env::var_os("PATH").unwrap());
    for program in programs {
        let installed = std::env::split_paths(&path).map(|path| path.join(program)).find(|path| path.exists());
        let installed = installed.unwrap_or_else(|| panic!("{program} is not installed"));
        std::os::unix::fs::symlink(installed, directory.path().join(program)).unwrap();
    }
    directory
}

/// Only Redis is installed: the versions that need nothing else run, and the others are skipped.
#[test]
fn versions_run_although_others_are_skipped() {
    let _shared = MACHINE.read().unwrap();
    // Redis, and what a process and its watchdog need.
    let only_redis = directory_with(&["redis-server", "redis-cli", "sh", "kill", "rm", "sleep"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["lab", "--only", "stock/above-zero", "limits/sliding-window", "--buyers", "100", "--stock", "10"]);
    let output = command.arg("--json").env("PATH", only_redis.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let versions = json["versions"].as_array().unwrap().iter();
    let verdicts: Vec<_> = versions.map(|version| (version["name"].as_str(), version["verdict"].as_str())).collect();
    let expected = [(Some("stock/above-zero"), Some("skipped")), (Some("limits/sliding-window"), Some("held"))];
    assert_eq!(verdicts, expected, "{json}");
    assert_eq!(json["missing_servers"], serde_json::json!(["mariadb"]));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("not installed: MariaDB; "), "{stderr}");
}

/// The Redis that is installed does not start. A version that could not be run is neither skipped nor as expected.
#[test]
fn a_version_that_comes_out_otherwise_is_an_error() {
    let _shared = MACHINE.read().unwrap();
    let programs = directory_with(&["redis-cli", "sh", "kill", "rm", "sleep"]);
    let broken = programs.path().join("redis-server");
    std::fs::write(&broken, "#!/bin/sh\nexit 1\n").unwrap();
    std::fs::set_permissions(&broken, PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["lab", "--only", "limits/no-limit", "limits/snowflake"]);
    let output = command.env("PATH", programs.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    for part in ["ERROR", "Redis did not start", "1 of 2 versions as expected", "not as expected: limits/no-limit\n"] {
        assert!(table.contains(part), "{part:?} is not in\n{table}");
    }
}

/// The smallest load is enough to see every flaw that the load shows.
#[test]
fn flaws_show_under_the_smallest_load() {
    let output = lab(&["--only", "limits", "sold-out", "reads/cache-aside", "--buyers", "16", "--stock", "8"]);
    let table = stdout(&output);
    assert!(table.contains("11 of 11 versions as expected"), "{table}");
    // Without a terminal, the progress is one line per version, in the order of the run.
    let progress = String::from_utf8(output.stderr).unwrap();
    let finished: Vec<&str> = progress.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let families = ["sold-out", "limits"];
    let expected: Vec<&str> = registry::all()
        .filter(|version| families.contains(&version.family.name()) || version.name == "reads/cache-aside")
        .map(|version| version.name)
        .collect();
    assert_eq!(finished, expected, "{progress}");
}

#[test]
fn options_that_cannot_work_are_refused_at_the_start() {
    let refused = |arguments: &[&str]| {
        let output = lab(arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let stock = refused(&["--only", "sold-out", "--buyers", "100", "--stock", "51"]);
    assert!(stock.contains("--stock 51 is above half of --buyers 100"), "{stock}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let below = file.path().join("report");
    // No version is named: all of them would run for minutes.
    let report = refused(&["--report", below.to_str().unwrap()]);
    assert!(report.contains(&format!("cannot write to {}", below.display())), "{report}");
    for not_valid in [&["--list", "--explain", "stock"][..], &["--buyers", "15"], &["--seed", "x"], &["--only"]] {
        let output = lab(not_valid);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{output:?}");
    }
    let help = stdout(&lab(&["--help"]));
    assert!(help.contains("Exit codes: 0") && help.contains("130: SIGINT or SIGTERM"), "{help}");
}

/// How long the program may take to end after a signal: a server that is being started is waited for.
const LONGEST_END: Duration = Duration::from_secs(40);

/// Runs some versions and sends a signal once a process with this part in its command line is a child. The program ends soon, and neither
/// servers nor data are left.
fn nothing_is_left_after(signal: &str, only: &str, child: &str) {
    let _shared = MACHINE.read().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.args(["lab", "--only", only, "--buyers", "100", "--stock", "10", "--json"]);
    let mut lab =
        command.current_dir(directory.path()).env("TMPDIR", directory.path()).stdout(Stdio::null()).spawn().unwrap();
    let children = || children_of(lab.id());
    wait_until("the child runs", || children().iter().any(|(_, command)| command.contains(child)));
    // Servers and nodes, each with a watchdog, whose arguments name the data.
    let started = children();
    let data: HashSet<String> =
        started.iter().flat_map(|(_, command)| command.split('\0').filter_map(data_of)).collect();
    assert!(!data.is_empty() && data.iter().all(|data| Path::new(data).exists()), "{data:?} {started:?}");
    assert!(Command::new("kill").args([signal, &lab.id().to_string()]).status().unwrap().success());
    let sent = Instant::now();
    wait_until("the program ends", || lab.try_wait().unwrap().is_some());
    assert!(sent.elapsed() < LONGEST_END, "{:?}", sent.elapsed());
    assert_eq!(lab.wait().unwrap().code(), Some(130));
    for (pid, command) in started {
        wait_until("a child has ended", || !is_running(pid, &command));
    }
    for data in data {
        assert!(!Path::new(&data).exists(), "{data}");
    }
    let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The directory of a private server that an argument names.
fn data_of(argument: &str) -> Option<String> {
    const PREFIX: &str = "/var/tmp/stampede-server-";
    let (_, rest) = argument.split_once(PREFIX)?;
    Some(format!("{PREFIX}{}", rest.split('/').next()?))
}

#[test]
fn nothing_is_left_after_ctrl_c_in_the_middle_of_a_tier() {
    nothing_is_left_after("-INT", "tiers/solo", "--tier\0solo");
}

#[test]
fn nothing_is_left_after_sigterm_while_a_server_starts() {
    nothing_is_left_after("-TERM", "queues/rabbitmq-early-ack", "rabbitmq-server");
}

/// The node of this version dies while it writes its (1 + seed modulo 20)th order of 40, and the others are lost.
#[test]
fn the_seed_is_used_and_reported() {
    for (seed, lost) in [(1, 39), (7, 33)] {
        let seed_text = seed.to_string();
        let output =
            lab(&["--only", "queues/memory", "--buyers", "16", "--stock", "8", "--seed", &seed_text, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!((&json["seed"], &json["versions"][0]["lost"]), (&seed.into(), &lost.into()), "{json}");
    }
}

/// The processes whose parent this is, with their command lines.
fn children_of(parent: u32) -> Vec<(u32, String)> {
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the name, which is in parentheses: the state and the parent.
        let found: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
        (found == parent).then(|| (pid, command_line(pid).unwrap_or_default()))
    };
    std::fs::read_dir("/proc").unwrap().filter_map(of).collect()
}

fn command_line(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()
}

fn is_running(pid: u32, command: &str) -> bool {
    command_line(pid).is_some_and(|now| now == command && !now.is_empty())
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within a minute");
        pause();
    }
}

#[test]
fn figures_of_a_report_are_written_into_the_documentation() {
    let directory = tempfile::tempdir().unwrap();
    let (docs, report) = (directory.path().join("docs"), directory.path().join("report"));
    let (docs_path, report_path) = (docs.to_str().unwrap(), report.to_str().unwrap());
    let update = || lab(&["--report", report_path, "--update-docs", docs_path]);
    std::fs::create_dir_all(&docs).unwrap();
    for name in ["lab.md", "lab.zh-CN.md"] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        std::fs::copy(source, docs.join(name)).unwrap();
    }
    stdout(&lab(&["--only", "limits/snowflake", "--buyers", "100", "--stock", "10", "--report", report_path]));
    let incomplete = update();
    assert_eq!(incomplete.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&incomplete.stderr).contains("stock/no-check was not run"), "{incomplete:?}");

    let path = report.join("lab.json");
    let mut run: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let list = stdout(&lab(&["--list"]));
    let of_versions = list.lines().filter(|line| line.starts_with("  "));
    let result = |line: &str| {
        let mut words = line.split_whitespace();
        let (name, expected) = (words.next().unwrap(), words.next().unwrap());
        serde_json::json!({ "name": name, "expected": expected, "as_expected": true, "reason": "", "orders_per_s": 4321.0 })
    };
    run["versions"] = of_versions.map(result).collect();
    std::fs::write(&path, run.to_string()).unwrap();
    stdout(&update());
    for name in ["lab.md", "lab.zh-CN.md"] {
        let page = std::fs::read_to_string(docs.join(name)).unwrap();
        assert!(page.contains("no_check.rs)") && page.contains("| 4,321 |"), "{page}");
    }
    let chart = std::fs::read_to_string(docs.join("lab.svg")).unwrap();
    assert!(chart.starts_with("<svg") && chart.contains("stock/no-check") && chart.contains("4321"), "{chart}");
}

#[test]
fn tiers_hold_and_their_statements_and_commands_are_counted() {
    for seed in 1..=count(20, 1) {
        let seed = seed.to_string();
        let output = lab(&["--only", "tiers", "--buyers", "500", "--stock", "50", "--seed", &seed, "--json"]);
        let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        let versions = json["versions"].as_array().unwrap();
        assert_eq!(versions.len(), 4, "seed {seed}: {json}");
        for version in versions {
            let number = |name: &str| version[name].as_f64().unwrap_or_else(|| panic!("seed {seed}: {version}"));
            let (sql, redis) = (number("sql_per_request"), number("redis_per_request"));
            // Orders are recorded in batches: fewer statements than the four of an order, and some for 50 orders.
            assert!(sql > 0.0 && sql < 4.0, "seed {seed}: {version}");
            let has_redis = version["name"] != "tiers/solo";
            assert_eq!(redis > 0.0, has_redis, "seed {seed}: {version}");
            assert!(redis < 20.0, "seed {seed}: {version}");
            let (rate, p99) = (number("orders_per_s"), number("p99_ms"));
            assert!(rate > 0.0 && p99 > 0.0, "seed {seed}: {version}");
            // The client of another crate sends the calls of the tiers that have a Redis. What a tier leaves in Redis is not looked for.
            let calls = version["redis_calls_per_request"].as_f64();
            assert_eq!(calls, (!has_redis).then_some(0.0), "seed {seed}: {version}");
            let counted = ["oversold", "undersold", "duplicated", "lost", "leaked"].map(|name| version[name].as_u64());
            assert_eq!(counted, [Some(0), Some(0), Some(0), Some(0), None], "seed {seed}: {version}");
            let named = |name: &str| {
                let mut figures = version["figures"].as_array().unwrap().iter();
                let figure = figures.find(|figure| figure[0] == name).and_then(|figure| figure[1].as_f64());
                figure.unwrap_or_else(|| panic!("seed {seed}: no {name:?}: {version}"))
            };
            assert_eq!((named(LOST), version["lost"].as_u64()), (0.0, Some(0)), "seed {seed}: {version}");
            // The node is killed while it sells a stock of half the buyers.
            let (before, after) = (named(BEFORE_KILL), named(AFTER_KILL));
            assert!((1.0..250.0).contains(&before), "seed {seed}: {version}");
            assert!(after >= 1.0, "seed {seed}: {version}");
        }
    }
}

/// With default settings, and with the start and the end of the servers. In a soak every version; otherwise those that take longest: two that
/// kill and start RabbitMQ once more, one that has thousands of slow queries, and a tier. These have more time, because the build is not
/// optimized and the machine may be busy.
#[test]
fn one_version_of_the_lab_ends_within_20_s() {
    const SLOWEST: &[&str] =
        &["queues/rabbitmq-unconfirmed", "queues/rabbitmq-ack-after-commit", "reads/cache-aside", "tiers/queued"];
    let is_slow = |name: &&str| SLOWEST.contains(name);
    let names: Vec<&str> =
        registry::all().map(|version| version.name).filter(|name| count(1, 0) == 1 || is_slow(name)).collect();
    assert!(names.len() >= SLOWEST.len(), "{names:?}");
    let longest = Duration::from_secs(if count(1, 0) == 1 { 20 } else { 60 });
    for name in names {
        let (output, elapsed) = lab_alone(&["--only", name, "--json"]);
        let json = stdout(&output);
        assert!(elapsed < longest, "{elapsed:?}: {json}");
    }
}

/// With default settings, in a soak only, because it takes minutes.
#[test]
fn the_whole_lab_ends_within_nine_minutes() {
    if count(1, 0) == 0 {
        return;
    }
    let (output, elapsed) = lab_alone(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(json["versions"].as_array().map(Vec::len), Some(registry::all().count()), "{json}");
    assert!(elapsed < Duration::from_secs(9 * 60), "{elapsed:?}: {json}");
}
