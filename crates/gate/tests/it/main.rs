//! What every gate must do, on each gate there is.

mod buyers;
mod conformance;
mod consumer;
mod outbox;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::{Gate, GateRecord};
use stampede_gate::{MemoryGate, RedisGate};
use stampede_redis::{Client, Servers};
use stampede_testkit::redis as server;

/// A gate, and what must live as long as it.
pub type Started = (Arc<dyn Gate>, Box<dyn Any + Send>);

/// One test per function of the conformance suite, for one gate.
macro_rules! conformance {
    ($module:ident, $start:expr) => {
        mod $module {
            use super::*;

            conformance!(@tests $start, sells_exactly_the_cap, an_unknown_sale_has_no_decisions, status_and_window_decide_before_stock,
                an_older_version_is_ignored, a_release_removes_its_own_mark_once, the_cap_never_falls_below_the_marks,
                opening_again_changes_nothing, nobody_buys_again_where_that_is_forbidden, the_generation_rises_with_releases_and_edits, digest_and_marks_agree,
                concurrent_buyers_get_exactly_the_cap);
        }
    };
    (@tests $start:expr, $($name:ident),*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $name() {
            let (gate, _server): Started = $start.await;
            conformance::$name(gate).await;
        })*
    };
}

conformance!(memory, async { (Arc::new(MemoryGate::new()) as Arc<dyn Gate>, Box::new(()) as Box<dyn Any + Send>) });
conformance!(redis, async {
    let server = server::start().unwrap();
    let gate = redis_gate(server.port(), "ledger", 1);
    gate.load_scripts(1).await.unwrap();
    (Arc::new(gate) as Arc<dyn Gate>, Box::new(server) as Box<dyn Any + Send>)
});

const OUTBOX_BOUND: u32 = 10_000;
const TIMEOUT: Duration = Duration::from_secs(5);

fn record(ledger: &str, incarnation: u64, replication_id: &str) -> GateRecord {
    GateRecord { ledger_id: ledger.to_owned(), incarnation, replication_id: replication_id.to_owned() }
}

fn redis_gate(port: u16, ledger: &str, incarnation: u64) -> RedisGate {
    let client = Client::new(Servers::Single(server::url(port)), TIMEOUT, TIMEOUT).unwrap();
    RedisGate::new(Arc::new(client), &record(ledger, incarnation, ""), OUTBOX_BOUND)
}
