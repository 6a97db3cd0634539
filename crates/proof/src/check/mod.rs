//! The invariants, and the evidence that they are checked against.
//!
//! - `findings`: the findings, and those that persist over several passes over a running system
//! - `rows`: the checks of ledger and gates; `steps`: the checks of the steps of orders; `responses`: the checks of a recorded history
//! - `settings`: which status and window a sale may have had at a time
//!
//! What cannot be checked in a given situation (a stopped system, no history) is reported as not checkable, never as passed.

mod findings;
mod responses;
mod rows;
mod settings;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use stampede_core::ports::SaleRecords;
use stampede_core::{Clock as _, OrderId, Payment, SaleId, SystemClock, Timestamp, UserId};

use crate::history::Attempt;
use findings::{Findings, Fingerprint};
use responses::Responses;

pub use findings::{InvariantCheck, Line, PersistentFindings, Verdict};

/// The state of a sale in the gate of a node at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateView {
    pub cap: u32,
    pub marks: u32,
    /// The digest of all marks: see [`stampede_core::mark_digest`].
    pub digest: u64,
    /// The marks themselves; read only if the digest differs from that of the ledger's rows.
    pub owners: Option<Vec<(UserId, OrderId)>>,
}

/// The gate of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGate {
    pub node: String,
    /// `None` if the node does not have the sale in memory.
    pub view: Option<GateView>,
    /// The number of requests of all sales that wait for the gate or the ledger.
    pub waiting: u64,
    /// The number of admitted orders of the sale in the outbox; `None` in a tier without one.
    pub outbox: Option<u64>,
    /// The number of messages of all sales in the queue; `None` in a tier without one, or if it cannot be read.
    pub queue: Option<u64>,
    /// The tier has a queue that cannot be read.
    pub is_queue_unreadable: bool,
}

/// What lies between the gate and the ledger. `None` where the tier has no such stage, or where it was not read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Admitted orders of this sale in the outbox of the gate.
    pub outbox: Option<u64>,
    /// Messages of all sales in the queue. What consumers have received is not counted.
    pub queue: Option<u64>,
    /// There is a queue, and no node can read it.
    pub is_queue_unreadable: bool,
}

impl Backlog {
    /// Whether so many orders of this sale may be on their way. How many orders a message of the queue contains is not known.
    fn may_hold(&self, orders: usize) -> bool {
        let is_unread = *self == Self::default() || self.is_queue_unreadable;
        is_unread || self.queue.is_some_and(|messages| messages > 0) || orders as u64 <= self.outbox.unwrap_or(0)
    }
}

/// Everything that is known about one sale.
#[derive(Debug, Clone)]
pub struct Evidence {
    pub ledger: SaleRecords,
    /// Whether the records were read from the database. The administration routes return neither `sold` nor pending releases or edits.
    pub from_database: bool,
    /// One per node; empty if the system is stopped.
    pub gates: Vec<NodeGate>,
    pub backlog: Backlog,
}

impl Evidence {
    fn fingerprint(&self) -> Fingerprint {
        let updates = |sum: u64, row: &stampede_core::ports::OrderRow| {
            sum.wrapping_mul(31)
                .wrapping_add(row.order.updated_at.ms().cast_unsigned())
                .wrapping_add(u64::from(row.live))
        };
        (self.ledger.orders.len(), self.ledger.orders.iter().fold(0, updates), self.ledger.sale.version)
    }

    /// Where accepted orders may be that have no row; `None` if each must have one. Of a stopped system, outbox and queue are not read.
    fn on_their_way(&self, rules: Rules) -> Option<Backlog> {
        let may_be = self.gates.is_empty() || self.backlog != Backlog::default();
        (may_be && !rules.at_rest).then_some(self.backlog)
    }
}

/// The default of [`Rules::max_sold_out_delay`].
pub const DEFAULT_SOLD_OUT_DELAY: Duration = Duration::from_secs(5);

/// How strict the checks are.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// The maximum difference between the clocks of nodes, database and history.
    pub max_clock_skew: Duration,
    /// How long after stock has come back a node may still answer that the sale is sold out. In a run without faults this is a second, and the
    /// expiry of the shield in the tier `shielded`; a mark whose release fails is released some seconds later.
    pub max_sold_out_delay: Duration,
    /// No requests are being processed, so no order may be waiting for the ledger.
    pub at_rest: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { max_clock_skew: Duration::from_secs(1), max_sold_out_delay: DEFAULT_SOLD_OUT_DELAY, at_rest: false }
    }
}

/// How long after a change the other nodes may still answer as before.
const PROPAGATION: Duration = Duration::from_secs(5);

const NO_SALES: &str = "there are no sales";
const NO_DATABASE: &str = "the database was not read (--database)";

/// Checks every invariant once. Without a history, the invariants that need one are not checkable. `stray` are the payments for orders that
/// the ledger does not have.
pub fn check_once(
    sales: &[Evidence],
    stray: &[Payment],
    history: Option<&[Attempt]>,
    rules: Rules,
) -> Vec<InvariantCheck> {
    let now = SystemClock.now();
    let each = |invariant, description, find: &dyn Fn(&Evidence, &mut Findings)| {
        let mut findings = Findings::default();
        sales.iter().for_each(|sale| find(sale, &mut findings));
        InvariantCheck::new(invariant, description, findings)
            .not_checkable_because(sales.is_empty().then(|| NO_SALES.to_owned()))
    };
    let from_database = |invariant, description, find: &dyn Fn(&Evidence, &mut Findings)| {
        if sales.iter().all(|sale| sale.from_database) {
            each(invariant, description, find)
        } else {
            InvariantCheck::not_checkable(invariant, description, NO_DATABASE)
        }
    };
    let answers = history.map(|history| Responses::group(history, sales));
    let with_history = |invariant, description, find: &dyn Fn(&Responses<'_>, &mut Findings)| match &answers {
        None => InvariantCheck::not_checkable(invariant, description, "there is no history (--history)"),
        Some(answers) if answers.is_empty() => {
            InvariantCheck::not_checkable(invariant, description, "the history is empty")
        }
        Some(answers) => {
            let mut findings = Findings::default();
            find(answers, &mut findings);
            InvariantCheck::new(invariant, description, findings)
        }
    };
    let stopped = !sales.is_empty() && sales.iter().all(|sale| sale.gates.is_empty());
    let gate = "gate: marks = live rows and quarantine ≤ cap";
    vec![
        from_database(1, "ledger: sold = live rows ≤ total = cap", &rows::ledger_counts_match),
        if stopped {
            InvariantCheck::not_checkable(1, gate, "the system is stopped: there is no gate to ask")
        } else {
            each(1, gate, &|sale, findings| rows::gates_match_ledger(sale, now, rules, findings))
        },
        each(2, "never more sold than the stock, at any moment", &|sale, findings| {
            rows::never_oversold(sale, rules, findings);
        })
        .not_checkable_because(settings::edits_unknown(sales)),
        each(3, "at most one live order per user and sale", &rows::one_per_user),
        with_history(4, "every confirmed order exists and stays", &|answers, findings| {
            responses::confirmed_orders_exist(answers, rules, findings);
        }),
        with_history(5, "every order was requested", &|answers, findings| {
            responses::orders_were_requested(answers, rules, findings);
        }),
        with_history(6, "sold out only when there was no stock", &|answers, findings| {
            responses::sold_out_was_correct(answers, rules, findings);
        }),
        with_history(6, "every other refusal gives the true reason", &|answers, findings| {
            responses::refusals_were_correct(answers, rules, findings);
        })
        .not_checkable_because(
            answers.as_ref().and_then(Responses::limited).or_else(|| settings::edits_unknown(sales)),
        ),
        each(7, "order ids are unique and increase", &|sale, findings| {
            rows::ids_match_creation_time(sale, rules, findings);
            if let Some(answers) = &answers {
                answers.ids_increase(sale.ledger.sale.id, rules, findings);
            }
        }),
        each(8, "admitted inside the sale's window", &|sale, findings| rows::inside_window(sale, rules, findings))
            .not_checkable_because(settings::edits_unknown(sales)),
        each(9, "orders take only legal steps", &steps::legal_steps).not_checkable_because(steps::unknown(sales)),
        from_database(9, "every payment ends as paid or refunded", &|sale, findings| {
            steps::payments_have_ended(sale, rules, findings);
        })
        .and(steps::stray_payments_have_ended(stray, rules))
        .not_checkable_because(steps::open_refunds(sales, stray, rules)),
        each(10, "no write under an older epoch", &rows::epochs_are_ordered)
            .not_checkable_because(rows::one_epoch(sales)),
        each(11, "nothing is pending: waiting orders, releases, quarantine", &|sale, findings| {
            rows::nothing_is_pending(sale, rules, findings);
        })
        .not_checkable_because(rows::releases_unknown(sales)),
        each(11, "outbox and queue are empty", &|sale, findings| rows::backlog_is_empty(sale, rules, findings))
            .not_checkable_because(rows::backlog_unknown(sales, rules)),
    ]
}

/// The results of one pass.
pub fn check(sales: &[Evidence], stray: &[Payment], history: Option<&[Attempt]>, rules: Rules) -> Vec<Line> {
    let judged = |mut check: InvariantCheck| {
        check.excuse(|_| true);
        check.line()
    };
    check_once(sales, stray, history, rules).into_iter().map(judged).collect()
}

/// How long a running system is polled.
#[derive(Debug, Clone, Copy)]
pub struct Polling {
    /// A finding counts if every pass during this time shows it. At rest, one that appears during this time counts as well: what is
    /// wrong with an order may change until everything is recorded.
    pub duration: Duration,
    pub interval: Duration,
}

/// The minimum number of passes before a finding counts, however long one takes.
const MIN_PASSES: u32 = 4;

/// Polls a running system until there are no findings, or until they have persisted. At rest only a pass without any finding is a success.
pub async fn poll<E>(
    polling: Polling,
    rules: Rules,
    history: Option<&[Attempt]>,
    mut gather: impl AsyncFnMut() -> Result<(Vec<Evidence>, Vec<Payment>), E>,
) -> Result<(Vec<Evidence>, Vec<Line>), E> {
    let deadline = Instant::now() + polling.duration;
    let mut persistent = PersistentFindings::default();
    loop {
        let (evidence, stray) = gather().await?;
        let fingerprints: HashMap<SaleId, Fingerprint> =
            evidence.iter().map(|sale| (sale.ledger.sale.id, sale.fingerprint())).collect();
        persistent.add(check_once(&evidence, &stray, history, rules), fingerprints);
        let passes = persistent.passes();
        let long_enough = Instant::now() >= deadline && passes >= MIN_PASSES;
        if persistent.is_clean() {
            return Ok((evidence, persistent.lines(1)));
        }
        if rules.at_rest {
            let is_last = Instant::now() >= deadline + polling.duration;
            if long_enough && (is_last || persistent.all_shown_by(MIN_PASSES)) {
                return Ok((evidence, persistent.lines(1)));
            }
        } else if long_enough || !persistent.any_shown_by(passes) {
            return Ok((evidence, persistent.lines(passes)));
        }
        tokio::time::sleep(polling.interval).await;
    }
}

/// A timestamp in the microseconds of a history.
fn history_us(at: Timestamp) -> u64 {
    u64::try_from(at.ms()).unwrap_or(0).saturating_mul(1000)
}
