//! The findings of a check, and those that persist over several passes over a running system.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Serialize;
use stampede_core::{OrderId, SaleId, UserId};

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
    sale: SaleId,
    subject: Subject,
    /// The index of the node whose gate shows it.
    node: Option<usize>,
}

impl FindingId {
    pub(super) const fn sale(kind: &'static str, sale: SaleId) -> Self {
        Self { kind, sale, subject: Subject::Sale, node: None }
    }

    pub(super) const fn user(kind: &'static str, sale: SaleId, user: UserId) -> Self {
        Self { kind, sale, subject: Subject::User(user), node: None }
    }

    pub(super) const fn order(kind: &'static str, sale: SaleId, order: OrderId) -> Self {
        Self { kind, sale, subject: Subject::Order(order), node: None }
    }

    pub(super) const fn on_node(self, index: usize) -> Self {
        Self { node: Some(index), ..self }
    }
}

#[derive(Debug, Clone)]
struct Finding {
    id: FindingId,
    text: String,
    /// Counts only if nothing has changed in the sale between two passes: the gate of a node sees the orders of other nodes later.
    only_at_rest: bool,
}

/// The findings about one invariant. There are at most as many as rows, marks and attempts, all of which are in memory.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, id: FindingId, text: String) {
        self.0.push(Finding { id, text, only_at_rest: false });
    }

    pub(super) fn add_at_rest(&mut self, id: FindingId, text: String) {
        self.0.push(Finding { id, text, only_at_rest: true });
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

    /// The reason why the invariant is not checkable, unless there are findings.
    pub(super) fn not_checkable_because(self, why: Option<String>) -> Self {
        Self { not_checkable: self.not_checkable.or(why), ..self }
    }

    pub(super) fn not_checkable(invariant: u8, description: &'static str, why: &str) -> Self {
        Self { invariant, description, findings: Vec::new(), not_checkable: Some(why.to_owned()) }
    }

    pub fn failed(&self) -> bool {
        !self.findings.is_empty()
    }

    pub fn line(&self) -> Line {
        let verdict = if self.failed() {
            let mut findings: Vec<String> =
                self.findings.iter().take(MAX_SHOWN).map(|finding| finding.text.clone()).collect();
            if self.findings.len() > MAX_SHOWN {
                findings.push(format!("and {} more", self.findings.len() - MAX_SHOWN));
            }
            Verdict::Failed { findings }
        } else if let Some(why) = &self.not_checkable {
            Verdict::NotCheckable { why: why.clone() }
        } else {
            Verdict::Passed
        };
        Line { invariant: self.invariant, description: self.description, verdict }
    }
}

/// Two passes over a sale have the same fingerprint if nothing has changed in it.
pub(super) type Fingerprint = (usize, u64, i64);

/// The findings that every pass so far has shown.
#[derive(Debug, Default)]
pub struct PersistentFindings {
    checks: Vec<InvariantCheck>,
    fingerprints: HashMap<SaleId, Fingerprint>,
    passes: u32,
}

impl PersistentFindings {
    /// Keeps the findings that were present before and are in this pass too.
    pub(super) fn add(&mut self, pass: Vec<InvariantCheck>, fingerprints: HashMap<SaleId, Fingerprint>) {
        if self.passes == 0 {
            self.checks = pass;
        } else {
            for (before, now) in self.checks.iter_mut().zip(pass) {
                let earlier: HashSet<FindingId> = before.findings.iter().map(|finding| finding.id).collect();
                let at_rest = |sale| self.fingerprints.get(&sale) == fingerprints.get(&sale);
                *before = now;
                before.findings.retain(|finding| {
                    earlier.contains(&finding.id) && (!finding.only_at_rest || at_rest(finding.id.sale))
                });
            }
        }
        self.fingerprints = fingerprints;
        self.passes += 1;
    }

    pub const fn passes(&self) -> u32 {
        self.passes
    }

    pub fn failed(&self) -> bool {
        self.checks.iter().any(InvariantCheck::failed)
    }

    pub fn lines(&self) -> Vec<Line> {
        self.checks.iter().map(InvariantCheck::line).collect()
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

    fn shown(persistent: &PersistentFindings) -> Vec<String> {
        match &persistent.lines()[0].verdict {
            Verdict::Failed { findings } => findings.clone(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn only_findings_of_every_pass_persist() {
        let mut persistent = PersistentFindings::default();
        for keys in [[(1, false), (2, false)], [(2, false), (3, false)]] {
            persistent.add(pass(&keys), HashMap::new());
        }
        assert_eq!(shown(&persistent), ["2"]);
        persistent.add(pass(&[(3, false)]), HashMap::new());
        assert!(!persistent.failed());
    }

    #[test]
    fn missing_marks_count_only_while_nothing_changes() {
        let fingerprint = |rows| HashMap::from([(SaleId::new(1).unwrap(), (rows, 0, 0))]);
        let mut persistent = PersistentFindings::default();
        persistent.add(pass(&[(1, true)]), fingerprint(1));
        persistent.add(pass(&[(1, true)]), fingerprint(1));
        assert!(persistent.failed());
        persistent.add(pass(&[(1, true)]), fingerprint(2));
        assert!(!persistent.failed());
    }
}
