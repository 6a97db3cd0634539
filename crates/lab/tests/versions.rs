//! Every flawed version is seen to fail with its flaw, and every sound one holds: with one seed, or with 20 if `SOAK` is set.

use stampede_lab::run::Outcome;
use stampede_lab::{Family, Flaw, Measured, Options, Progress, Version, VersionResult, registry, run};
use stampede_testkit::count;

/// Versions whose flaw others have too, or that have several: each must fail in its own way, with a part of the reason, and with no more
/// flaws than these.
const OWN_FLAWS: &[(&str, usize, &str)] = &[
    ("one-per-person/leaking-lock", 1, "300 entries left in memory"),
    ("locks/setnx-expire", 1, "the lock is still taken"),
    ("locks/no-owner", 1, "a late release deleted the lock of another node"),
    ("locks/thread-id", 1, "a late release deleted the lock of another node"),
    ("locks/two-steps", 1, "a late release deleted the lock of another node"),
    ("locks/compare-and-delete", 1, "the lease ended while its holder worked"),
    ("locks/one-master", 1, "after the fail-over"),
    ("sold-out/none", 1, "calls of Redis per request after the sell-out"),
    ("sold-out/local", 1, "not sold by the other node"),
    ("reads/cache-aside", 2, "reads of shops that do not exist"),
    ("reads/delete-first", 1, "is read after the change"),
    ("reads/empty-values", 1, "after 5 expiries"),
    ("reads/bloom-filter", 1, "after 5 expiries"),
    ("reads/no-jitter", 1, "database calls in 100 ms"),
    ("limits/no-limit", 1, "requests of one user passed"),
    ("limits/session-in-process", 2, "refused at the other node"),
];

/// Versions whose flaw shows in the race, in the load, or in both, and that must have no other flaw.
const ONE_KIND: &[(&str, Flaw)] =
    &[("stock/no-check", Flaw::Oversold), ("one-per-person/check-then-insert", Flaw::Duplicated)];

/// Versions that refuse too many, and must not sell too many.
const NOT_OVERSOLD: &[&str] = &["stock/version-column", "stock/stock-as-version", "pre-deduction/script"];

/// Versions that write each order of the load with one statement and need no other, however slow the database is.
const ONE_STATEMENT_PER_ORDER: &[&str] = &[
    "pre-deduction/script",
    "pre-deduction/inline-roll-back",
    "queues/memory",
    "queues/list",
    "queues/processing-list",
    "queues/pub-sub",
    "queues/stream-group",
    "queues/rabbitmq-unconfirmed",
    "queues/rabbitmq-early-ack",
    "queues/rabbitmq-ack-after-commit",
];

/// The columns that have a figure, of all versions of a family or of one version. The others have none: the version does not use that server,
/// another crate sends its calls, or there is nothing to compare with.
const MEASURED: &[(&str, &str)] = &[
    ("stock", "orders/s p99 SQL oversold undersold duplicated"),
    ("one-per-person", "orders/s p99 SQL oversold undersold duplicated"),
    ("one-per-person/leaking-lock", "orders/s p99 SQL oversold undersold duplicated leaked"),
    ("one-per-person/keyed-lock", "orders/s p99 SQL oversold undersold duplicated leaked"),
    ("pre-deduction", "orders/s p99 SQL Redis calls oversold undersold duplicated lost leaked"),
    ("queues", "orders/s p99 SQL Redis calls oversold undersold duplicated lost leaked"),
    ("locks", "orders/s p99 Redis calls duplicated leaked"),
    ("locks/setnx-expire", "orders/s p99 Redis calls leaked"),
    ("locks/watchdog", "orders/s p99 Redis duplicated leaked"),
    ("locks/one-master", "orders/s p99 Redis duplicated"),
    ("locks/multi-lock", "orders/s p99 Redis duplicated leaked"),
    ("locks/red-lock", "orders/s p99 Redis duplicated leaked"),
    ("sold-out", "orders/s p99 Redis calls oversold undersold leaked"),
    ("reads", "p99 SQL Redis calls"),
    ("reads/two-levels", "p99 SQL Redis"),
    ("limits/no-limit", "p99 Redis calls undersold leaked"),
    ("limits/sliding-window", "p99 Redis calls undersold leaked"),
    ("limits/redis-counter", "Redis calls duplicated leaked"),
    ("limits/blocks", "Redis calls duplicated leaked"),
    ("limits/snowflake", "duplicated"),
    ("limits/session-in-process", "leaked"),
    ("limits/session-in-redis", "Redis calls leaked"),
];

/// Calls per request of versions in which every request of the load makes the same ones: a script, a pipeline or a command is one.
const CALLS_PER_REQUEST: &[(&str, f64)] = &[
    ("pre-deduction/script", 1.0),
    ("pre-deduction/inline-roll-back", 1.0),
    ("queues/memory", 1.0),
    ("queues/pub-sub", 1.0),
    ("queues/rabbitmq-unconfirmed", 1.0),
    ("queues/rabbitmq-early-ack", 1.0),
    ("locks/setnx-expire", 3.0),
    ("locks/no-owner", 2.0),
    ("locks/thread-id", 2.0),
    ("locks/compare-and-delete", 2.0),
    ("sold-out/none", 1.0),
    ("sold-out/local", 0.0),
    ("limits/no-limit", 1.0),
    ("limits/redis-counter", 1.0),
    ("limits/session-in-redis", 3.0),
];

/// Versions that send nothing to Redis but the script that admits.
const ONE_SCRIPT: &[&str] = &[
    "pre-deduction/script",
    "pre-deduction/inline-roll-back",
    "queues/memory",
    "queues/rabbitmq-unconfirmed",
    "queues/rabbitmq-early-ack",
];

/// Statements of the load: those of an order and those of a refusal, each with the begin and the end of its transaction.
const STATEMENTS: &[(&str, u64)] = &[
    ("stock/row-lock", 5 * STOCK + 3 * (BUYERS - STOCK)),
    ("stock/not-negative", 4 * (STOCK + 1) + 3 * (BUYERS - STOCK - 1)),
    ("stock/above-zero", 4 * STOCK + 3 * (BUYERS - STOCK)),
];

/// Orders that are confirmed in the crash of the queues.
const CRASH_STOCK: u64 = 40;
const BUYERS: u64 = 300;
const STOCK: u64 = 30;

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
        let outcome = run(Options { buyers: BUYERS, stock: STOCK, seed, prepare_node: None }, &versions, &Names).await;
        // A skipped version is not as expected either: the test needs all servers.
        let others: Vec<_> = outcome.versions.iter().filter(|result| result.as_expected != Some(true)).collect();
        assert!(others.is_empty(), "seed {seed}: {others:#?}");
        flaws_have_their_own_reasons(&outcome);
        orders_are_lost_with_what_holds_them(&outcome);
        columns_have_figures_of_what_was_measured(&outcome);
        calls_commands_and_statements_are_those_of_the_version(&outcome);
        statements_of_the_lab_are_not_counted(&outcome);
        no_lost_order_means_that_something_was_killed(&outcome);
        no_leak_means_that_something_was_looked_for(&outcome);
        no_flaw_of_a_sale_means_that_it_was_judged(&outcome);
        database_calls_of_all_reads_are_counted(&outcome);
    }
}

/// A version must not count as flawed because of another mistake than its own.
fn flaws_have_their_own_reasons(outcome: &Outcome) {
    let seed = outcome.seed;
    for (name, flaws, seen) in OWN_FLAWS {
        let (result, measured) = result(outcome, name);
        assert!(result.reason.contains(seen), "seed {seed}: {result:#?}");
        assert_eq!(measured.flaws.len(), *flaws, "seed {seed}: {result:#?}");
    }
    for (name, flaw) in ONE_KIND {
        let (result, measured) = result(outcome, name);
        assert!(measured.flaws.iter().all(|(found, _)| found == flaw), "seed {seed}: {result:#?}");
    }
    for name in NOT_OVERSOLD {
        let (result, measured) = result(outcome, name);
        assert_eq!(measured.oversold, Some(0), "seed {seed}: {result:#?}");
    }
    let (separate, measured) = result(outcome, "pre-deduction/separate-commands");
    // At most the item that the dead node had deducted.
    assert!(measured.undersold.is_some_and(|left| left <= 1), "seed {seed}: {separate:#?}");
    let (not_negative, measured) = result(outcome, "stock/not-negative");
    // One item in the race, and one in the load.
    assert_eq!((measured.oversold, measured.undersold), (Some(2), Some(0)), "seed {seed}: {not_negative:#?}");
    let (list, measured) = result(outcome, "queues/list");
    assert_eq!(measured.lost, Some(1), "seed {seed}: the order that the dead node had taken: {list:#?}");
    let (with_keys, measured) = result(outcome, "queues/rabbitmq-key-deleted");
    assert_eq!(measured.leaked, Some(STOCK), "seed {seed}: one key of each order is left: {with_keys:#?}");
    assert_eq!(measured.lost, Some(1), "seed {seed}: the order whose key the dead node had set: {with_keys:#?}");
    let (rolled_back, measured) = result(outcome, "pre-deduction/inline-roll-back");
    assert_eq!(measured.undersold, Some(1), "seed {seed}: the item that the dead node had deducted: {rolled_back:#?}");
}

/// The node dies at its (1 + seed modulo 20)th order; it has written those before. The broker has all orders when it dies.
fn orders_are_lost_with_what_holds_them(outcome: &Outcome) {
    let seed = outcome.seed;
    let unwritten = CRASH_STOCK - seed % 20;
    for (name, lost) in
        [("queues/memory", unwritten), ("queues/pub-sub", unwritten), ("queues/rabbitmq-unconfirmed", CRASH_STOCK)]
    {
        let (result, measured) = result(outcome, name);
        assert_eq!(measured.lost, Some(lost), "seed {seed}: {result:#?}");
    }
    // What the broker had not yet delivered is not lost.
    let (early_ack, measured) = result(outcome, "queues/rabbitmq-early-ack");
    assert!(measured.lost.is_some_and(|lost| (1..=unwritten).contains(&lost)), "seed {seed}: {early_ack:#?}");
    // Without a crash too.
    let (from_end, measured) = result(outcome, "queues/stream-from-end");
    assert!(measured.lost > Some(CRASH_STOCK), "seed {seed}: {from_end:#?}");
}

fn columns_have_figures_of_what_was_measured(outcome: &Outcome) {
    for result in &outcome.versions {
        let row = |name: &str| MEASURED.iter().find(|(of, _)| *of == name);
        let expected = row(result.name).or_else(|| row(result.family.name())).map(|(_, columns)| *columns);
        let columns = measured_columns(result);
        assert_eq!(Some(columns.as_str()), expected, "seed {}: {result:#?}", outcome.seed);
    }
}

/// The names of the columns that have a figure.
fn measured_columns(result: &VersionResult) -> String {
    let measured = result.measured.as_ref().unwrap();
    // Another crate sends the calls of this version. None may have been necessary during the load, which counts as none sent.
    let has_calls = measured.redis_calls_per_request.is_some() && result.name != "reads/two-levels";
    let columns = [
        ("orders/s", measured.orders_per_s.is_some()),
        ("p99", measured.p99_ms.is_some()),
        ("SQL", measured.sql_per_request.is_some()),
        ("Redis", measured.redis_per_request.is_some()),
        ("calls", has_calls),
        ("oversold", measured.oversold.is_some()),
        ("undersold", measured.undersold.is_some()),
        ("duplicated", measured.duplicated.is_some()),
        ("lost", measured.lost.is_some()),
        ("leaked", measured.leaked.is_some()),
    ];
    let names: Vec<&str> = columns.into_iter().filter(|(_, has_figure)| *has_figure).map(|(name, _)| name).collect();
    names.join(" ")
}

fn calls_commands_and_statements_are_those_of_the_version(outcome: &Outcome) {
    let seed = outcome.seed;
    for (name, calls) in CALLS_PER_REQUEST {
        let (result, measured) = result(outcome, name);
        assert_eq!(measured.redis_calls_per_request, Some(*calls), "seed {seed}: {result:#?}");
    }
    for name in ONE_SCRIPT {
        let (result, measured) = result(outcome, name);
        // The script, with four commands for an order, one for the second request of that buyer, and two for those who get nothing.
        let commands = 7 * STOCK + 3 * (measured.requests - 2 * STOCK);
        let executed = measured.redis_per_request.unwrap() * measured.requests as f64;
        assert_eq!(executed.round(), commands as f64, "seed {seed}: {result:#?}");
    }
    for (name, statements) in STATEMENTS {
        let (result, measured) = result(outcome, name);
        let executed = measured.sql_per_request.unwrap() * measured.requests as f64;
        assert_eq!(executed.round(), *statements as f64, "seed {seed}: {result:#?}");
    }
}

/// The lab polls the table of orders until all are written.
fn statements_of_the_lab_are_not_counted(outcome: &Outcome) {
    for name in ONE_STATEMENT_PER_ORDER {
        let (result, measured) = result(outcome, name);
        let statements = measured.sql_per_request.unwrap() * measured.requests as f64;
        assert_eq!(statements.round(), STOCK as f64, "seed {}: {result:#?}", outcome.seed);
    }
}

fn no_lost_order_means_that_something_was_killed(outcome: &Outcome) {
    let of = |name: &str| result(outcome, name).1.lost;
    let killed = ["queues/processing-list", "queues/stream-group", "queues/rabbitmq-ack-after-commit"].map(of);
    assert_eq!(killed, [Some(0); 3], "seed {}", outcome.seed);
    // They answer after the commit.
    let answered_late = ["separate-commands", "script", "inline-roll-back", "reconciled"];
    assert_eq!(answered_late.map(|name| of(&format!("pre-deduction/{name}"))), [Some(0); 4], "seed {}", outcome.seed);
    let not_killed = ["stock/above-zero", "one-per-person/unique-index", "locks/watchdog"].map(of);
    assert_eq!(not_killed, [None; 3], "seed {}", outcome.seed);
}

fn no_leak_means_that_something_was_looked_for(outcome: &Outcome) {
    let of = |name| result(outcome, name).1.leaked;
    // Entries in memory, and keys in Redis.
    let looked_for = ["one-per-person/keyed-lock", "queues/stream-group", "limits/sliding-window"].map(of);
    assert_eq!(looked_for, [Some(0); 3], "seed {}", outcome.seed);
    let looked_for = ["sold-out/pub-sub", "limits/session-in-redis"].map(of);
    assert_eq!(looked_for, [Some(0); 2], "seed {}", outcome.seed);
    assert!(of("limits/session-in-process").is_some_and(|sessions| sessions > 0), "seed {}", outcome.seed);
    let not_looked_for = ["stock/above-zero", "one-per-person/unique-index", "reads/two-levels"].map(of);
    assert_eq!(not_looked_for, [None; 3], "seed {}", outcome.seed);
}

fn no_flaw_of_a_sale_means_that_it_was_judged(outcome: &Outcome) {
    let of = |name| {
        let (_, measured) = result(outcome, name);
        [measured.oversold, measured.undersold, measured.duplicated]
    };
    assert_eq!(of("stock/above-zero"), [Some(0); 3], "seed {}", outcome.seed);
    assert_eq!(of("sold-out/pub-sub"), [Some(0), Some(0), None], "seed {}", outcome.seed);
    assert_eq!(of("locks/watchdog"), [None, None, Some(0)], "seed {}", outcome.seed);
    assert_eq!(of("reads/two-levels"), [None; 3], "seed {}", outcome.seed);
    let sells = result(outcome, "sold-out/none").1.orders_per_s;
    assert!(sells.is_some_and(|rate| rate > 0.0), "seed {}", outcome.seed);
}

fn database_calls_of_all_reads_are_counted(outcome: &Outcome) {
    let mut versions = outcome.versions.iter().filter(|result| result.family == Family::Reads).peekable();
    assert!(versions.peek().is_some());
    for version in versions {
        let figures = &version.measured.as_ref().unwrap().figures;
        for kind in ["a hot shop", "missing shops", "an expired shop"] {
            let name = format!("database calls per 10,000 reads of {kind}");
            assert!(figures.iter().any(|(figure, _)| *figure == name), "seed {}: {version:#?}", outcome.seed);
        }
    }
}

fn result<'a>(outcome: &'a Outcome, name: &str) -> (&'a VersionResult, &'a Measured) {
    let result = outcome.versions.iter().find(|result| result.name == name).unwrap();
    (result, result.measured.as_ref().unwrap())
}
