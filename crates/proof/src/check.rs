//! The invariants, and the evidence they are held against.
//!
//! What cannot be checked in a given situation (a stopped system, no history) is said to be so, never to have passed.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Serialize;
use stampede_core::ids::{Snowflake, WorkerId};
use stampede_core::ports::{Inspected, OrderRow};
use stampede_core::{OrderId, OrderStatus, SaleId, UserId, mark_digest};

use crate::history::{Attempt, Heard};

/// What the gate says of a sale, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GateView {
    pub cap: u32,
    pub marks: u32,
    /// Over all marks: see [`mark_digest`].
    pub digest: u64,
}

/// All that is known of one sale.
#[derive(Debug, Clone)]
pub struct Evidence {
    pub ledger: Inspected,
    /// Read from the database itself. The administrator's routes tell neither `sold`, nor the quarantine, nor what is owed.
    pub from_database: bool,
    /// `None` if there is no gate to be asked, because the system is stopped.
    pub gate: Option<GateView>,
    /// How many admitted orders wait for the ledger; `None` if nobody can be asked.
    pub waiting: Option<u64>,
}

/// What came of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Verdict {
    Passed,
    Failed { findings: Vec<String> },
    NotCheckable { why: String },
}

/// One invariant, or one half of it, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    pub invariant: u8,
    pub says: &'static str,
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl Line {
    pub const fn failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed { .. })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, more) = match &self.verdict {
            Verdict::Passed => ("passed", String::new()),
            Verdict::Failed { findings } => ("FAILED", format!(": {}", findings.join("; "))),
            Verdict::NotCheckable { why } => ("not checkable", format!(": {why}")),
        };
        write!(f, "{:>2}  {:<13}  {}{more}", self.invariant, mark, self.says)
    }
}

/// How many findings are told of one invariant; there may be more.
const MAX_FINDINGS: usize = 5;

#[derive(Default)]
struct Findings {
    told: Vec<String>,
    more: usize,
}

impl Findings {
    fn add(&mut self, finding: impl FnOnce() -> String) {
        if self.told.len() < MAX_FINDINGS {
            self.told.push(finding());
        } else {
            self.more += 1;
        }
    }

    fn verdict(mut self) -> Verdict {
        if self.told.is_empty() {
            return Verdict::Passed;
        }
        if self.more > 0 {
            self.told.push(format!("and {} more", self.more));
        }
        Verdict::Failed { findings: self.told }
    }
}

fn not_checkable(why: &str) -> Verdict {
    Verdict::NotCheckable { why: why.to_owned() }
}

/// Every invariant on these sales. The history may be of several sales; without one, what needs it is not checkable.
pub fn check(sales: &[Evidence], history: Option<&[Attempt]>) -> Vec<Line> {
    let mut told: HashMap<SaleId, Vec<Attempt>> = HashMap::new();
    for attempt in history.unwrap_or_default() {
        told.entry(attempt.sale).or_default().push(*attempt);
    }
    let of = |sale: &Evidence| told.get(&sale.ledger.sale.id).map_or(&[][..], Vec::as_slice);
    let each = |find: &dyn Fn(&Evidence, &mut Findings)| {
        let mut findings = Findings::default();
        sales.iter().for_each(|sale| find(sale, &mut findings));
        findings.verdict()
    };
    let with_history = |find: &dyn Fn(&Evidence, &[Attempt], &mut Findings)| match history {
        None => not_checkable("there is no history (--history)"),
        Some(_) => each(&|sale, findings| find(sale, of(sale), findings)),
    };
    let has_gate = sales.iter().any(|sale| sale.gate.is_some());
    let from_database = |find: &dyn Fn(&Evidence, &mut Findings)| {
        if sales.iter().all(|sale| sale.from_database) {
            each(find)
        } else {
            not_checkable("the database was not read (--database)")
        }
    };
    let lines = [
        (1, "ledger: sold = live rows ≤ total = cap", from_database(&ledger_adds_up)),
        (
            1,
            "gate: marks = live rows and quarantine ≤ cap",
            if has_gate { each(&gate_agrees) } else { not_checkable("the system is stopped: there is no gate to ask") },
        ),
        (2, "never more sold than there were, at any moment", each(&no_prefix_oversells)),
        (3, "at most one live order a person and sale", each(&one_a_person)),
        (4, "every yes has its row", with_history(&every_yes_has_its_row)),
        (5, "every row has its attempt", with_history(&every_row_has_its_attempt)),
        (6, "nobody was told sold out while there was stock", with_history(&sold_out_was_true)),
        (7, "ids are unique and rise", each(&|sale, findings| ids_rise(sale, of(sale), findings))),
        (8, "admitted inside the sale's window", each(&inside_the_window)),
        (9, "orders took only legal steps", each(&legal_steps)),
        (10, "no write under an older epoch", each(&epochs_fence)),
        (11, "nothing is left over: queues, owed releases, quarantine", from_database(&nothing_left)),
    ];
    lines.into_iter().map(|(invariant, says, verdict)| Line { invariant, says, verdict }).collect()
}

fn live(sale: &Evidence) -> impl Iterator<Item = &OrderRow> {
    sale.ledger.orders.iter().filter(|row| row.live)
}

fn ledger_adds_up(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    let live = live(evidence).count();
    if sale.sold as usize != live {
        findings.add(|| format!("sale {}: sold is {}, live rows are {live}", sale.id, sale.sold));
    }
    if live > sale.total as usize {
        findings.add(|| format!("sale {}: {live} live rows of {}: oversold", sale.id, sale.total));
    }
    if sale.cap != sale.total {
        findings.add(|| format!("sale {}: cap is {}, total is {}", sale.id, sale.cap, sale.total));
    }
}

fn gate_agrees(evidence: &Evidence, findings: &mut Findings) {
    let (Some(gate), sale) = (evidence.gate, &evidence.ledger.sale) else { return };
    if gate.marks > gate.cap {
        findings.add(|| format!("sale {}: {} marks, the cap is {}", sale.id, gate.marks, gate.cap));
    }
    if gate.cap != sale.total {
        findings
            .add(|| format!("sale {}: the gate's cap is {}, the ledger's total is {}", sale.id, gate.cap, sale.total));
    }
    let rows: HashSet<OrderId> = evidence.ledger.orders.iter().map(|row| row.order.id).collect();
    let quarantined = evidence.ledger.quarantine.iter().filter(|(_, order)| !rows.contains(order));
    let owners = live(evidence).map(|row| (row.order.user, row.order.id)).chain(quarantined.copied());
    let owners: Vec<_> = owners.collect();
    if gate.marks as usize != owners.len() {
        findings.add(|| format!("sale {}: {} marks, {} live rows or quarantined", sale.id, gate.marks, owners.len()));
    } else if gate.digest != mark_digest(owners.into_iter()) {
        findings.add(|| format!("sale {}: as many marks as live rows, but not of the same people and orders", sale.id));
    }
}

fn no_prefix_oversells(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    // Who has died freed its place at the time of its last step; in one millisecond the freeing comes first.
    let mut steps = Vec::new();
    for row in evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
        steps.push((row.order.created_at, 1));
        if !row.live {
            steps.push((row.order.updated_at.max(row.order.created_at), -1));
        }
    }
    steps.sort_unstable();
    let mut sold = 0_i64;
    for (at, step) in steps {
        sold += step;
        if sold > i64::from(sale.total) {
            findings.add(|| format!("sale {}: {sold} sold of {} at {at}", sale.id, sale.total));
            return;
        }
    }
}

fn one_a_person(evidence: &Evidence, findings: &mut Findings) {
    let mut has: HashMap<UserId, OrderId> = HashMap::new();
    for row in live(evidence) {
        if let Some(other) = has.insert(row.order.user, row.order.id) {
            let (sale, user, id) = (evidence.ledger.sale.id, row.order.user, row.order.id);
            findings.add(|| format!("sale {sale}: user {user} has {other} and {id}"));
        }
    }
}

fn rows_by_id(evidence: &Evidence) -> HashMap<OrderId, &OrderRow> {
    evidence.ledger.orders.iter().map(|row| (row.order.id, row)).collect()
}

fn every_yes_has_its_row(evidence: &Evidence, history: &[Attempt], findings: &mut Findings) {
    let rows = rows_by_id(evidence);
    let mut yes: HashMap<UserId, OrderId> = HashMap::new();
    for attempt in history {
        let (sale, user) = (attempt.sale, attempt.user);
        if attempt.heard == Heard::Wrong {
            findings.add(|| format!("sale {sale}: user {user} got an answer that nobody should get"));
        }
        if !attempt.heard.is_yes() {
            continue;
        }
        let Some(order) = attempt.order else {
            findings.add(|| format!("sale {sale}: user {user} got a yes without an order"));
            continue;
        };
        match rows.get(&order) {
            None => findings.add(|| format!("lost: order {order} of user {user} was confirmed and is not there")),
            Some(row) if row.order.user != user => {
                findings.add(|| format!("order {order} was told to user {user} and belongs to {}", row.order.user));
            }
            Some(row) if row.order.status == OrderStatus::Rejected => {
                findings.add(|| format!("order {order} of user {user} was confirmed and is rejected"));
            }
            Some(_) => {}
        }
        // Asking again gives the same order, as long as it lives.
        if let Some(other) = yes.insert(user, order).filter(|other| *other != order)
            && [other, order].iter().all(|id| rows.get(id).is_some_and(|row| row.live))
        {
            findings.add(|| format!("duplicated: user {user} was told {other} and {order}"));
        }
    }
}

fn every_row_has_its_attempt(evidence: &Evidence, history: &[Attempt], findings: &mut Findings) {
    let asked: HashSet<UserId> =
        history.iter().filter(|attempt| attempt.heard.may_have_row()).map(|attempt| attempt.user).collect();
    for row in evidence.ledger.orders.iter().filter(|row| row.live && !asked.contains(&row.order.user)) {
        findings.add(|| format!("unexpected: order {} of user {}, who never heard yes", row.order.id, row.order.user));
    }
}

fn sold_out_was_true(evidence: &Evidence, history: &[Attempt], findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    // How many may have had one at a moment: everybody who had asked by then and did not surely fail.
    let mut starts: HashMap<UserId, u64> = HashMap::new();
    for attempt in history.iter().filter(|attempt| attempt.heard.may_have_row()) {
        let start = starts.entry(attempt.user).or_insert(u64::MAX);
        *start = attempt.start_us.min(*start);
    }
    let mut starts: Vec<u64> = starts.into_values().collect();
    starts.sort_unstable();
    for attempt in history.iter().filter(|attempt| attempt.heard == Heard::SoldOut) {
        let perhaps = starts.partition_point(|&start| start <= attempt.end_us);
        if (perhaps as u64) < u64::from(sale.total) {
            let (user, id, total) = (attempt.user, sale.id, sale.total);
            findings.add(|| {
                format!("sale {id}: user {user} was told sold out when at most {perhaps} of {total} were gone")
            });
        }
    }
}

/// How far a gate's clock may be behind the one that made the id.
const CLOCKS_APART_MS: i64 = 5_000;

fn ids_rise(evidence: &Evidence, history: &[Attempt], findings: &mut Findings) {
    let mut seen = HashSet::new();
    for row in &evidence.ledger.orders {
        let (id, made_at) = (row.order.id, Snowflake::made_at(row.order.id.get()));
        if !seen.insert(id) {
            findings.add(|| format!("order {id} is there twice"));
        }
        if made_at.ms() > row.order.created_at.ms() + CLOCKS_APART_MS {
            findings.add(|| format!("order {id} of {} has an id of {made_at}: of the future", row.order.created_at));
        }
    }
    // Who asked after another was answered has the higher id, if both came from the same maker.
    let mut of: HashMap<OrderId, UserId> = HashMap::new();
    let mut starts: Vec<&Attempt> = history.iter().filter(|attempt| attempt.heard == Heard::Created).collect();
    starts.sort_unstable_by_key(|attempt| attempt.start_us);
    let mut ends = starts.clone();
    ends.sort_unstable_by_key(|attempt| attempt.end_us);
    let mut ended = ends.into_iter().peekable();
    let mut highest: HashMap<WorkerId, OrderId> = HashMap::new();
    for attempt in starts {
        let Some(order) = attempt.order else { continue };
        if let Some(other) = of.insert(order, attempt.user).filter(|other| *other != attempt.user) {
            findings.add(|| format!("order {order} was told to user {other} and to user {}", attempt.user));
        }
        while let Some(before) = ended.next_if(|before| before.end_us < attempt.start_us) {
            if let Some(id) = before.order {
                let highest = highest.entry(Snowflake::maker(id.get())).or_insert(id);
                *highest = id.max(*highest);
            }
        }
        if let Some(before) = highest.get(&Snowflake::maker(order.get())).filter(|before| **before >= order) {
            findings.add(|| format!("order {order} was made after {before}, by the same maker"));
        }
    }
}

fn inside_the_window(evidence: &Evidence, findings: &mut Findings) {
    let window = evidence.ledger.sale.window;
    for row in evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
        let at = row.order.created_at;
        if at < window.begin || at >= window.end {
            findings.add(|| format!("order {} was admitted at {at}, outside the window", row.order.id));
        }
    }
}

fn legal_steps(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in &evidence.ledger.orders {
        let order = &row.order;
        if row.live != order.status.is_live() {
            let live = if row.live { "live" } else { "not live" };
            findings.add(|| format!("order {} is {} and {live}", order.id, order.status.as_str()));
        }
        if order.updated_at < order.created_at {
            findings.add(|| format!("order {} took its last step before it was made", order.id));
        }
        if order.price != sale.price {
            findings.add(|| {
                format!("order {} has the price {}, its sale {}", order.id, order.price.cents(), sale.price.cents())
            });
        }
    }
}

fn epochs_fence(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in evidence.ledger.orders.iter().filter(|row| row.epoch > sale.epoch) {
        findings.add(|| format!("order {} has the epoch {}, its sale {}", row.order.id, row.epoch.0, sale.epoch.0));
    }
    // An epoch is a fencing token: once a later one has sold, an earlier one must not.
    let mut rows: Vec<&OrderRow> =
        evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected).collect();
    rows.sort_unstable_by_key(|row| (row.order.created_at, row.epoch));
    let mut highest = None;
    for row in rows {
        if highest.is_some_and(|epoch| row.epoch < epoch) {
            findings
                .add(|| format!("order {} was made under the epoch {}, after a later one", row.order.id, row.epoch.0));
        }
        highest = highest.max(Some(row.epoch));
    }
}

fn nothing_left(evidence: &Evidence, findings: &mut Findings) {
    let sale = evidence.ledger.sale.id;
    if let Some(waiting @ 1..) = evidence.waiting {
        findings.add(|| format!("{waiting} admitted orders wait for the ledger"));
    }
    if !evidence.ledger.owed.is_empty() {
        findings.add(|| format!("sale {sale}: {} releases are owed to the gate", evidence.ledger.owed.len()));
    }
    if !evidence.ledger.quarantine.is_empty() {
        findings.add(|| format!("sale {sale}: {} orders are in quarantine", evidence.ledger.quarantine.len()));
    }
}
