//! The findings of a check, and those that persist over several passes over a running system.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Serialize;
use stampede_core::{OrderId, SaleId, UserId};

use super::Backlog;

/// What a finding is about, within its sale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Subject {
    Sale,
    User(UserId),
    Order(OrderId),
}

/// The identity of a finding. Two passes show the same finding if the identities are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FindingId {
    kind: &'static str,
    /// `None` if it is about no sale.
    sale: Option<SaleId>,
    subject: Subject,
    /// The index of the node whose gate shows it.
    node: Option<usize>,
}

impl FindingId {
    pub(super) const fn sale(kind: &'static str, sale: SaleId) -> Self {
        Self { kind, sale: Some(sale), subject: Subject::Sale, node: None }
    }

    pub(super) const fn user(kind: &'static str, sale: SaleId, user: UserId) -> Self {
        Self { kind, sale: Some(sale), subject: Subject::User(user), node: None }
    }

    pub(super) const fn order(kind: &'static str, sale: SaleId, order: OrderId) -> Self {
        Self { kind, sale: Some(sale), subject: Subject::Order(order), node: None }
    }

    /// About an order that the ledger does not have.
    pub(super) const fn unknown_order(kind: &'static str, order: OrderId) -> Self {
        Self { kind, sale: None, subject: Subject::Order(order), node: None }
    }

    pub(super) const fn on_node(self, index: usize) -> Self {
        Self { node: Some(index), ..self }
    }
}

/// When a finding counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counts {
    Always,
    /// If nothing has changed in the sale between two passes: the gate of a node sees the orders of other nodes later.
    AtRest,
    /// If the order, which has no row, cannot be on its way: the outbox and the queue do not hold as many orders.
    NotOnItsWay(Backlog),
}

#[derive(Debug, Clone)]
struct Finding {
    id: FindingId,
    text: String,
    counts: Counts,
    /// The order may be on its way, so the finding does not count.
    is_excused: bool,
}

impl Finding {
    const fn only_at_rest(&self) -> bool {
        match self.counts {
            Counts::Always => false,
            Counts::AtRest => true,
            // A consumer may have received the message and not recorded its orders yet. The broker does not tell.
            Counts::NotOnItsWay(backlog) => backlog.queue.is_some(),
        }
    }
}

/// The findings about one invariant. There are at most as many as rows, marks and attempts, all of which are in memory.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, id: FindingId, text: String) {
        self.push(id, text, Counts::Always);
    }

    pub(super) fn add_at_rest(&mut self, id: FindingId, text: String) {
        self.push(id, text, Counts::AtRest);
    }

    /// An order has no row. With a backlog, it may be on its way.
    pub(super) fn add_without_row(&mut self, id: FindingId, text: String, backlog: Option<Backlog>) {
        self.push(id, text, backlog.map_or(Counts::Always, Counts::NotOnItsWay));
    }

    fn push(&mut self, id: FindingId, text: String, counts: Counts) {
        self.0.push(Finding { id, text, counts, is_excused: false });
    }
}

/// One invariant, or a part of it, checked in one pass.
#[derive(Debug)]
pub struct InvariantCheck {
    invariant: u8,
    description: &'static str,
    findings: Vec<Finding>,
    not_checkable: Option<String>,
}

impl InvariantCheck {
    pub(super) fn new(invariant: u8, description: &'static str, findings: Findings) -> Self {
        Self { invariant, description, findings: findings.0, not_checkable: None }
    }

    pub(super) fn and(mut self, findings: Findings) -> Self {
        self.findings.extend(findings.0);
        self
    }

    /// The reason why the invariant is not checkable, unless there are findings.
    pub(super) fn not_checkable_because(self, why: Option<String>) -> Self {
        Self { not_checkable: self.not_checkable.or(why), ..self }
    }

    pub(super) fn not_checkable(invariant: u8, description: &'static str, why: &str) -> Self {
        Self { invariant, description, findings: Vec::new(), not_checkable: Some(why.to_owned()) }
    }

    /// Excuses the orders without a row that may be on their way, judged by how many there are. `is_shown_before`: whether the pass before
    /// has shown the finding. Then the order was admitted before this pass read how much is on its way. Others may be newer.
    pub(super) fn excuse(&mut self, is_shown_before: impl Fn(FindingId) -> bool) {
        let mut without_row: HashMap<(Option<SaleId>, Option<usize>), HashSet<FindingId>> = HashMap::new();
        for Finding { id, counts, .. } in &self.findings {
            if matches!(counts, Counts::NotOnItsWay(_)) && is_shown_before(*id) {
                without_row.entry((id.sale, id.node)).or_default().insert(*id);
            }
        }
        for finding in &mut self.findings {
            if let Counts::NotOnItsWay(backlog) = finding.counts {
                let orders = without_row.get(&(finding.id.sale, finding.id.node)).map_or(0, HashSet::len);
                finding.is_excused = backlog.may_hold(orders);
            }
        }
    }

    pub fn failed(&self) -> bool {
        self.findings.iter().any(|finding| !finding.is_excused)
    }

    /// Why orders without a row cannot be judged; `None` if there are none.
    fn on_their_way(&self) -> Option<String> {
        let (mut orders, mut is_stopped, mut is_unreadable) = (HashSet::new(), false, false);
        for Finding { id, counts, .. } in self.findings.iter().filter(|finding| finding.is_excused) {
            orders.insert((id.sale, id.subject));
            if let Counts::NotOnItsWay(backlog) = counts {
                is_stopped |= *backlog == Backlog::default();
                is_unreadable |= backlog.is_queue_unreadable;
            }
        }
        let count = orders.len();
        (count > 0).then(|| match (is_stopped, is_unreadable) {
            (true, _) => {
                format!(
                    "the system is stopped: {count} accepted orders without a row may be in its outbox or its queue"
                )
            }
            (false, true) => format!("{count} orders without a row may be in the queue, which cannot be read"),
            (false, false) => format!("{count} orders are on their way, in the outbox or the queue"),
        })
    }

    pub fn line(&self) -> Line {
        let mut failed = self.findings.iter().filter(|finding| !finding.is_excused).map(|finding| finding.text.clone());
        let verdict = if self.failed() {
            let mut findings: Vec<String> = failed.by_ref().take(MAX_SHOWN).collect();
            let more = failed.count();
            if more > 0 {
                findings.push(format!("and {more} more"));
            }
            Verdict::Failed { findings }
        } else if let Some(why) = self.on_their_way().or_else(|| self.not_checkable.clone()) {
            Verdict::NotCheckable { why }
        } else {
            Verdict::Passed
        };
        Line { invariant: self.invariant, description: self.description, verdict }
    }
}

/// Two passes over a sale have the same fingerprint if nothing has changed in it.
pub(super) type Fingerprint = (usize, u64, i64);

/// The findings of the last pass, and for how many passes each has been shown without a gap.
#[derive(Debug, Default)]
pub struct PersistentFindings {
    checks: Vec<InvariantCheck>,
    /// By check: the first pass of those in a row in which a finding counted.
    since: HashMap<(usize, FindingId), u32>,
    /// By check: the first pass of those in a row in which an order had no row, also while it may have been on its way.
    without_row: HashMap<(usize, FindingId), u32>,
    fingerprints: HashMap<SaleId, Fingerprint>,
    passes: u32,
}

impl PersistentFindings {
    pub(super) fn add(&mut self, mut pass: Vec<InvariantCheck>, fingerprints: HashMap<SaleId, Fingerprint>) {
        self.passes += 1;
        let (mut since, mut without_row) = (HashMap::new(), HashMap::new());
        for (index, check) in pass.iter_mut().enumerate() {
            check.excuse(|id| self.passes == 1 || self.without_row.contains_key(&(index, id)));
            for finding in &check.findings {
                let (key, sale) = ((index, finding.id), finding.id.sale);
                if matches!(finding.counts, Counts::NotOnItsWay(_)) {
                    without_row.insert(key, self.without_row.get(&key).copied().unwrap_or(self.passes));
                }
                if finding.is_excused {
                    continue;
                }
                let fingerprint = |of: &HashMap<SaleId, Fingerprint>| sale.and_then(|sale| of.get(&sale).copied());
                let at_rest = fingerprint(&self.fingerprints) == fingerprint(&fingerprints);
                let earlier = self.since.get(&key).filter(|_| !finding.only_at_rest() || at_rest);
                since.insert(key, earlier.copied().unwrap_or(self.passes));
            }
        }
        (self.checks, self.since, self.without_row, self.fingerprints) = (pass, since, without_row, fingerprints);
    }

    pub const fn passes(&self) -> u32 {
        self.passes
    }

    /// Whether the last pass has shown nothing.
    pub(super) fn is_clean(&self) -> bool {
        self.since.is_empty() && self.without_row.is_empty()
    }

    fn is_shown_by(&self, first_pass: u32, passes: u32) -> bool {
        self.passes + 1 - first_pass >= passes
    }

    /// Whether one of the findings was shown by each of the last `passes` passes, also if it did not count in some of them.
    pub(super) fn any_shown_by(&self, passes: u32) -> bool {
        self.since.values().chain(self.without_row.values()).any(|&first| self.is_shown_by(first, passes))
    }

    /// Whether each of the findings was shown by each of the last `passes` passes.
    pub(super) fn all_shown_by(&self, passes: u32) -> bool {
        self.since.values().all(|&first| self.is_shown_by(first, passes))
    }

    /// The result, with the findings that each of the last `passes` passes has shown. One that did not count in all of them is excused.
    pub(super) fn lines(mut self, passes: u32) -> Vec<Line> {
        let mut checks = std::mem::take(&mut self.checks);
        for (index, check) in checks.iter_mut().enumerate() {
            let shown = |since: &HashMap<(usize, FindingId), u32>, finding: &Finding| {
                since.get(&(index, finding.id)).is_some_and(|&first| self.is_shown_by(first, passes))
            };
            check.findings.retain_mut(|finding| {
                let counts = shown(&self.since, finding);
                finding.is_excused = !counts;
                counts || shown(&self.without_row, finding)
            });
        }
        checks.iter().map(InvariantCheck::line).collect()
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Verdict {
    Passed,
    Failed { findings: Vec<String> },
    NotCheckable { why: String },
}

/// One invariant, or a part of it, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    pub invariant: u8,
    pub description: &'static str,
    #[serde(flatten)]
    pub verdict: Verdict,
}

impl Line {
    pub const fn failed(&self) -> bool {
        matches!(self.verdict, Verdict::Failed { .. })
    }

    pub const fn checked(&self) -> bool {
        !matches!(self.verdict, Verdict::NotCheckable { .. })
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, more) = match &self.verdict {
            Verdict::Passed => ("passed", String::new()),
            Verdict::Failed { findings } => ("FAILED", format!(": {}", findings.join("; "))),
            Verdict::NotCheckable { why } => ("not checkable", format!(": {why}")),
        };
        write!(f, "{:>2}  {:<13}  {}{more}", self.invariant, mark, self.description)
    }
}

/// The maximum number of findings that are shown for one invariant.
const MAX_SHOWN: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(id: i64) -> FindingId {
        FindingId::order("x", SaleId::new(1).unwrap(), OrderId::new(id).unwrap())
    }

    /// Orders without a row, while so much is on its way.
    fn without_row(ids: &[i64], outbox: u64, queue: Option<u64>) -> Vec<InvariantCheck> {
        let backlog = Backlog { outbox: Some(outbox), queue, is_queue_unreadable: false };
        let mut findings = Findings::default();
        ids.iter().for_each(|&id| findings.add_without_row(finding(id), id.to_string(), Some(backlog)));
        vec![InvariantCheck::new(1, "x", findings)]
    }

    fn pass(keys: &[(i64, bool)]) -> Vec<InvariantCheck> {
        let mut findings = Findings::default();
        for &(id, at_rest) in keys {
            match at_rest {
                true => findings.add_at_rest(finding(id), id.to_string()),
                false => findings.add(finding(id), id.to_string()),
            }
        }
        vec![InvariantCheck::new(1, "x", findings)]
    }

    fn shown(persistent: PersistentFindings, passes: u32) -> Vec<String> {
        match &persistent.lines(passes)[0].verdict {
            Verdict::Failed { findings } => findings.clone(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn only_findings_of_several_passes_persist() {
        let added = |all: &[&[(i64, bool)]]| {
            let mut persistent = PersistentFindings::default();
            all.iter().for_each(|keys| persistent.add(pass(keys), HashMap::new()));
            persistent
        };
        let two: [&[_]; 2] = [&[(1, false), (2, false)], &[(2, false), (3, false)]];
        assert!(added(&two).any_shown_by(2) && !added(&two).all_shown_by(2));
        assert_eq!(shown(added(&two), 2), ["2"]);
        assert_eq!(shown(added(&two), 1), ["2", "3"]);
        let three = [two[0], two[1], &[(3, false)]];
        assert!(!added(&three).any_shown_by(3) && !added(&three).is_clean());
        assert_eq!(shown(added(&three), 2), ["3"]);
        assert!(added(&[two[0], &[]]).is_clean());
    }

    #[test]
    fn missing_marks_count_only_while_nothing_changes() {
        let fingerprint = |rows| HashMap::from([(SaleId::new(1).unwrap(), (rows, 0, 0))]);
        let mut persistent = PersistentFindings::default();
        persistent.add(pass(&[(1, true)]), fingerprint(1));
        persistent.add(pass(&[(1, true)]), fingerprint(1));
        assert!(persistent.any_shown_by(2));
        persistent.add(pass(&[(1, true)]), fingerprint(2));
        assert!(!persistent.any_shown_by(2));
    }

    #[test]
    fn orders_without_a_row_count_only_if_they_cannot_be_on_their_way() {
        let verdict = |passes: Vec<Vec<InvariantCheck>>| {
            let mut persistent = PersistentFindings::default();
            let count = u32::try_from(passes.len()).unwrap();
            passes.into_iter().for_each(|pass| persistent.add(pass, HashMap::new()));
            assert!(!persistent.is_clean());
            persistent.lines(count).remove(0).verdict
        };
        let on_their_way = |count: u32| Verdict::NotCheckable {
            why: format!("{count} orders are on their way, in the outbox or the queue"),
        };
        let lost = |ids: &[&str]| Verdict::Failed { findings: ids.iter().map(|&id| id.to_owned()).collect() };
        let two = |outbox, queue| vec![without_row(&[1, 2], outbox, queue), without_row(&[1, 2], outbox, queue)];
        assert_eq!(verdict(two(2, None)), on_their_way(2));
        assert_eq!(verdict(two(1, None)), lost(&["1", "2"]), "one of them is not in the outbox");
        assert_eq!(verdict(two(0, Some(1))), on_their_way(2), "how many orders a message has is not known");
        assert_eq!(verdict(two(0, Some(0))), lost(&["1", "2"]));
        // Recorded, or on its way in between.
        assert_eq!(verdict(vec![without_row(&[1], 1, None), without_row(&[2], 1, None)]), Verdict::Passed);
        assert_eq!(verdict(vec![without_row(&[1], 1, None), without_row(&[1], 0, None)]), on_their_way(1));
        assert_eq!(verdict(vec![without_row(&[1], 0, Some(1)), without_row(&[1], 0, Some(0))]), on_their_way(1));
        // Order 3 was admitted after the second pass had read the outbox.
        assert_eq!(verdict(vec![without_row(&[1, 2], 2, None), without_row(&[1, 2, 3], 2, None)]), on_their_way(2));
        assert_eq!(verdict(vec![without_row(&[1, 2], 1, None), without_row(&[1, 2, 3], 1, None)]), lost(&["1", "2"]));
    }

    /// With RabbitMQ, a consumer may have received an order.
    #[test]
    fn orders_that_a_consumer_may_have_received_count_only_while_nothing_changes() {
        let fingerprint = |rows| HashMap::from([(SaleId::new(1).unwrap(), (rows, 0, 0))]);
        for (queue, changes, is_lost) in [(Some(0), true, false), (Some(0), false, true), (None, true, true)] {
            let mut persistent = PersistentFindings::default();
            for pass in 0..3 {
                persistent.add(without_row(&[1], 0, queue), fingerprint(if changes { pass } else { 0 }));
            }
            assert_eq!(persistent.lines(3)[0].failed(), is_lost, "{queue:?} {changes}");
        }
    }
}
