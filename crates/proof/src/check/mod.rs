//! The invariants, and the evidence that they are checked against.
//!
//! - `findings`: what is found, and what is left of it after several looks at a live system
//! - `rows`: what ledger and gates show; `answers`: what a recorded history adds
//!
//! What cannot be checked in a given situation (a stopped system, no history) is reported as such, never as passed.

mod answers;
mod findings;
mod rows;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use stampede_core::ports::SaleRecords;
use stampede_core::{Clock as _, OrderId, SaleId, SystemClock, Timestamp, UserId};

use crate::history::Attempt;
use answers::Answers;
use findings::{Findings, Fingerprint};

pub use findings::{Judgement, Line, Persisting, Verdict};

/// What the gate of a node holds of a sale, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GateView {
    pub cap: u32,
    pub marks: u32,
    /// Over all marks: see [`stampede_core::mark_digest`].
    pub digest: u64,
    /// The marks themselves; read only if the digest is not what the ledger's rows have.
    pub owners: Option<Vec<(UserId, OrderId)>>,
}

/// The answer of one node about its gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGate {
    pub node: String,
    /// `None` if the node does not hold the sale in memory.
    pub view: Option<GateView>,
    /// How many admitted orders of all sales wait for the ledger.
    pub waiting: u64,
}

/// All that is known of one sale.
#[derive(Debug, Clone)]
pub struct Evidence {
    pub ledger: SaleRecords,
    /// Read from the database itself. The administrator's routes tell neither `sold`, nor the quarantine, nor owed releases, nor top-ups.
    pub from_database: bool,
    /// One for each node; empty if the system is stopped.
    pub gates: Vec<NodeGate>,
}

impl Evidence {
    fn fingerprint(&self) -> Fingerprint {
        let updates = |sum: u64, row: &stampede_core::ports::OrderRow| {
            sum.wrapping_mul(31)
                .wrapping_add(row.order.updated_at.ms().cast_unsigned())
                .wrapping_add(u64::from(row.live))
        };
        (self.ledger.orders.len(), self.ledger.orders.iter().fold(0, updates), self.ledger.sale.ver)
    }
}

/// How strictly to judge.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// How far the clocks of nodes, database and history may be apart.
    pub clocks_apart: Duration,
    /// Nothing is under way any more: no order may be waiting for the ledger.
    pub at_rest: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self { clocks_apart: Duration::from_secs(1), at_rest: false }
    }
}

const NO_SALES: &str = "there are no sales";
const NO_DATABASE: &str = "the database was not read (--database)";

/// Every invariant on these sales, as one look shows them. The history may be of several sales; without one, what needs it is not checkable.
pub fn judge(sales: &[Evidence], history: Option<&[Attempt]>, rules: Rules) -> Vec<Judgement> {
    let now = SystemClock.now();
    let each = |invariant, says, find: &dyn Fn(&Evidence, &mut Findings)| {
        let mut findings = Findings::default();
        sales.iter().for_each(|sale| find(sale, &mut findings));
        Judgement::new(invariant, says, findings).unless_found(sales.is_empty().then(|| NO_SALES.to_owned()))
    };
    let from_database = |invariant, says, find: &dyn Fn(&Evidence, &mut Findings)| {
        if sales.iter().all(|sale| sale.from_database) {
            each(invariant, says, find)
        } else {
            Judgement::not_checkable(invariant, says, NO_DATABASE)
        }
    };
    let answers = history.map(|history| Answers::group(history, sales));
    let with_history = |invariant, says, find: &dyn Fn(&Answers<'_>, &mut Findings)| match &answers {
        None => Judgement::not_checkable(invariant, says, "there is no history (--history)"),
        Some(answers) if answers.is_empty() => Judgement::not_checkable(invariant, says, "the history is empty"),
        Some(answers) => {
            let mut findings = Findings::default();
            find(answers, &mut findings);
            Judgement::new(invariant, says, findings)
        }
    };
    let stopped = !sales.is_empty() && sales.iter().all(|sale| sale.gates.is_empty());
    let gate = "gate: marks = live rows and quarantine ≤ cap";
    vec![
        from_database(1, "ledger: sold = live rows ≤ total = cap", &rows::ledger_adds_up),
        if stopped {
            Judgement::not_checkable(1, gate, "the system is stopped: there is no gate to ask")
        } else {
            each(1, gate, &|sale, findings| rows::gates_agree(sale, now, findings))
        },
        each(2, "never more sold than there were, at any moment", &|sale, findings| {
            rows::no_prefix_oversells(sale, rules, findings);
        })
        .unless_found(rows::top_ups_unknown(sales)),
        each(3, "at most one live order per user and sale", &rows::one_per_user),
        with_history(4, "every yes has its row, and keeps it", &answers::every_yes_has_its_row),
        with_history(5, "every row has its attempt", &answers::every_row_has_its_attempt),
        with_history(6, "sold out only where there was no stock", &|answers, findings| {
            answers::sold_out_was_true(answers, rules, findings);
        }),
        with_history(6, "every other refusal gives the true reason", &|answers, findings| {
            answers::refusals_were_true(answers, rules, findings);
        })
        .unless_found(answers.as_ref().and_then(Answers::limited)),
        each(7, "ids are unique and rise", &|sale, findings| {
            rows::ids_are_of_their_time(sale, rules, findings);
            if let Some(answers) = &answers {
                answers.ids_rise(sale.ledger.sale.id, findings);
            }
        }),
        each(8, "admitted inside the sale's window", &rows::inside_the_window),
        each(9, "orders took only legal steps", &rows::legal_states).unless_found(Some(rows::NO_STEPS.to_owned())),
        each(10, "no write under an older epoch", &rows::epochs_fence).unless_found(rows::one_epoch(sales)),
        from_database(11, "nothing is left over: queues, pending_releases releases, quarantine", &|sale, findings| {
            rows::nothing_left(sale, rules, findings);
        })
        .unless_found(rows::owed_while_stopped(sales)),
    ]
}

/// The result of one look.
pub fn check(sales: &[Evidence], history: Option<&[Attempt]>, rules: Rules) -> Vec<Line> {
    judge(sales, history, rules).iter().map(Judgement::line).collect()
}

/// For how long a live system is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// A finding counts if every look of this time shows it.
    pub lasting: Duration,
    pub every: Duration,
}

/// There are at least so many looks, however long one takes, before a finding counts.
const MIN_LOOKS: u32 = 4;

/// Looks at a system again and again until nothing is found any more, or what is found has lasted.
pub async fn look<E>(
    patience: Patience,
    rules: Rules,
    history: Option<&[Attempt]>,
    mut gather: impl AsyncFnMut() -> Result<Vec<Evidence>, E>,
) -> Result<(Vec<Evidence>, Vec<Line>), E> {
    let deadline = Instant::now() + patience.lasting;
    let mut persisting = Persisting::default();
    loop {
        let evidence = gather().await?;
        let fingerprints: HashMap<SaleId, Fingerprint> =
            evidence.iter().map(|sale| (sale.ledger.sale.id, sale.fingerprint())).collect();
        persisting.add(judge(&evidence, history, rules), fingerprints);
        let long_enough = Instant::now() >= deadline && persisting.looks() >= MIN_LOOKS;
        if !persisting.failed() || long_enough {
            return Ok((evidence, persisting.lines()));
        }
        tokio::time::sleep(patience.every).await;
    }
}

/// The same moment in the microseconds of a history.
fn history_us(at: Timestamp) -> u64 {
    u64::try_from(at.ms()).unwrap_or(0).saturating_mul(1000)
}
