//! What a check finds, and what is left of it after several looks.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Serialize;
use stampede_core::SaleId;

/// Names a finding, so that it is recognised in the next look: what is wrong, where (the number of the node), with which id.
pub(super) type Key = (&'static str, usize, i64);

#[derive(Debug, Clone)]
struct Finding {
    key: Key,
    text: String,
    /// Counts only while nothing happens in this sale: a gate of one node learns of orders of the others later.
    only_at_rest: Option<SaleId>,
}

/// The findings about one invariant. As many as there are rows, marks and attempts at most, all of which are in memory.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, key: Key, text: String) {
        self.0.push(Finding { key, text, only_at_rest: None });
    }

    pub(super) fn add_at_rest(&mut self, sale: SaleId, key: Key, text: String) {
        self.0.push(Finding { key, text, only_at_rest: Some(sale) });
    }
}

/// One invariant, or a part of it, as one look shows it.
#[derive(Debug)]
pub struct Judgement {
    invariant: u8,
    says: &'static str,
    findings: Vec<Finding>,
    not_checkable: Option<String>,
}

impl Judgement {
    pub(super) fn new(invariant: u8, says: &'static str, findings: Findings) -> Self {
        Self { invariant, says, findings: findings.0, not_checkable: None }
    }

    /// What is said if there are no findings.
    pub(super) fn unless_found(self, why: Option<String>) -> Self {
        Self { not_checkable: self.not_checkable.or(why), ..self }
    }

    pub(super) fn not_checkable(invariant: u8, says: &'static str, why: &str) -> Self {
        Self { invariant, says, findings: Vec::new(), not_checkable: Some(why.to_owned()) }
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
        Line { invariant: self.invariant, says: self.says, verdict }
    }
}

/// Tells whether anything happened in a sale between two looks.
pub(super) type Fingerprint = (usize, u64, i64);

/// What every look so far has shown.
#[derive(Debug, Default)]
pub struct Persisting {
    judgements: Vec<Judgement>,
    fingerprints: HashMap<SaleId, Fingerprint>,
    looks: u32,
}

impl Persisting {
    /// Keeps what was found before and is found again.
    pub(super) fn add(&mut self, look: Vec<Judgement>, fingerprints: HashMap<SaleId, Fingerprint>) {
        if self.looks == 0 {
            self.judgements = look;
        } else {
            for (before, now) in self.judgements.iter_mut().zip(look) {
                let earlier: HashSet<Key> = before.findings.iter().map(|finding| finding.key).collect();
                let at_rest = |sale: &SaleId| self.fingerprints.get(sale) == fingerprints.get(sale);
                *before = now;
                before.findings.retain(|finding| {
                    earlier.contains(&finding.key) && finding.only_at_rest.as_ref().is_none_or(at_rest)
                });
            }
        }
        self.fingerprints = fingerprints;
        self.looks += 1;
    }

    pub const fn looks(&self) -> u32 {
        self.looks
    }

    pub fn failed(&self) -> bool {
        self.judgements.iter().any(Judgement::failed)
    }

    pub fn lines(&self) -> Vec<Line> {
        self.judgements.iter().map(Judgement::line).collect()
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
    pub says: &'static str,
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
        write!(f, "{:>2}  {:<13}  {}{more}", self.invariant, mark, self.says)
    }
}

/// How many findings are shown of one invariant; there may be more.
const MAX_SHOWN: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn look(keys: &[(i64, bool)]) -> Vec<Judgement> {
        let mut findings = Findings::default();
        for &(id, at_rest) in keys {
            match at_rest {
                true => findings.add_at_rest(SaleId::new(1).unwrap(), ("x", 0, id), id.to_string()),
                false => findings.add(("x", 0, id), id.to_string()),
            }
        }
        vec![Judgement::new(1, "x", findings)]
    }

    fn shown(persisting: &Persisting) -> Vec<String> {
        match &persisting.lines()[0].verdict {
            Verdict::Failed { findings } => findings.clone(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn only_what_every_look_shows_is_left() {
        let mut persisting = Persisting::default();
        for keys in [[(1, false), (2, false)], [(2, false), (3, false)]] {
            persisting.add(look(&keys), HashMap::new());
        }
        assert_eq!(shown(&persisting), ["2"]);
        persisting.add(look(&[(3, false)]), HashMap::new());
        assert!(!persisting.failed());
    }

    #[test]
    fn what_a_gate_has_not_learnt_yet_counts_at_rest_alone() {
        let fingerprint = |rows| HashMap::from([(SaleId::new(1).unwrap(), (rows, 0, 0))]);
        let mut persisting = Persisting::default();
        persisting.add(look(&[(1, true)]), fingerprint(1));
        persisting.add(look(&[(1, true)]), fingerprint(1));
        assert!(persisting.failed());
        persisting.add(look(&[(1, true)]), fingerprint(2));
        assert!(!persisting.failed());
    }
}
