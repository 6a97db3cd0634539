//! What every gate must do, on each gate there is.

mod conformance;

use std::sync::Arc;

use stampede_core::ports::Gate;
use stampede_gate::MemoryGate;

/// One test per function of the conformance suite, for one gate.
macro_rules! conformance {
    ($module:ident, $new:expr) => {
        mod $module {
            use super::*;

            conformance!(@tests $new, sells_exactly_the_cap, an_unknown_sale_has_no_decisions, status_and_window_decide_before_stock,
                an_older_version_is_ignored, a_release_removes_its_own_mark_once, the_cap_never_falls_below_the_marks,
                opening_again_changes_nothing, the_generation_rises_with_releases_and_edits, digest_and_marks_agree,
                concurrent_buyers_get_exactly_the_cap);
        }
    };
    (@tests $new:expr, $($name:ident),*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $name() {
            conformance::$name($new).await;
        })*
    };
}

conformance!(memory, Arc::new(MemoryGate::new()) as Arc<dyn Gate>);
