//! The status and the window that a sale may have had at a time, from its edits. An edit is in effect at some time between the request and
//! the moment at which the gate was known to have it, so the settings before it and after it overlap.

use std::time::Duration;

use stampede_core::ports::SettingChange;
use stampede_core::{SaleStatus, Timestamp, Window};

use super::{Evidence, PROPAGATION, Rules, history_us};
use crate::history::Attempt;

const BEFORE_ALL: Timestamp = Timestamp::from_ms(i64::MIN);
const AFTER_ALL: Timestamp = Timestamp::from_ms(i64::MAX);

/// Settings that may have been in effect in a period.
#[derive(Debug, Clone, Copy)]
struct Period {
    status: SaleStatus,
    window: Window,
    from: Timestamp,
    until: Timestamp,
}

/// Everything that is known about the settings of a sale.
#[derive(Debug)]
pub(super) struct Settings {
    periods: Vec<Period>,
    /// Whether the periods have every status that the sale has had.
    knows_statuses: bool,
    /// The same of its windows.
    knows_windows: bool,
    max_clock_skew: Duration,
    /// How long after an edit the gate of another node may decide by the settings before it.
    gate_lag: Duration,
}

/// Why the settings and the stock at an earlier moment are not known: edits can be read only from the database.
pub(super) fn edits_unknown(sales: &[Evidence]) -> Option<String> {
    let edited = sales.iter().any(|sale| !sale.from_database && sale.ledger.sale.version > 1);
    edited.then(|| format!("a sale was edited, and {}", super::NO_DATABASE))
}

/// Whether each node has a gate of its own. Not known of a stopped system.
fn may_have_several_gates(evidence: &Evidence) -> bool {
    evidence.gates.is_empty() || has_several_gates(evidence)
}

/// Whether each of several nodes has a gate of its own: then it learns of the others a moment later.
pub(super) fn has_several_gates(evidence: &Evidence) -> bool {
    evidence.gates.len() > 1 && evidence.gates.iter().all(|gate| gate.outbox.is_none())
}

impl Settings {
    pub(super) fn of(evidence: &Evidence, rules: Rules) -> Self {
        let (sale, changes) = (&evidence.ledger.sale, &evidence.ledger.stock_changes);
        let edits: Vec<_> = evidence.ledger.edits.iter().filter(|edit| edit.change.is_change()).collect();
        // Every edit of an operator raises the version. Reconciling may raise it as well, and edits by older versions of Stampede or by
        // hand were not kept.
        let kept = edits.len() + changes.iter().filter(|change| change.is_edit).count();
        let is_complete = sale.version <= 1 + i64::try_from(kept).unwrap_or(i64::MAX);

        let mut status = sale.status;
        let mut window = sale.window;
        for edit in edits.iter().rev() {
            match edit.change {
                SettingChange::Status { from, .. } => status = from,
                SettingChange::Window { from, .. } => window = from,
            }
        }
        let mut periods = Vec::with_capacity(edits.len() + 2);
        let mut from = BEFORE_ALL;
        for edit in edits {
            periods.push(Period { status, window, from, until: edit.applied_at.unwrap_or(AFTER_ALL) });
            match edit.change {
                SettingChange::Status { to, .. } => status = to,
                SettingChange::Window { to, .. } => window = to,
            }
            from = edit.asked_at;
        }
        let now = Period { status: sale.status, window: sale.window, from, until: AFTER_ALL };
        periods.push(now);
        if !is_complete {
            // Since when these hold is not known.
            periods.push(Period { from: BEFORE_ALL, ..now });
        }
        let knows_windows = evidence.from_database || sale.version <= 1;
        Self {
            periods,
            knows_statuses: knows_windows && is_complete,
            knows_windows,
            max_clock_skew: rules.max_clock_skew,
            gate_lag: if may_have_several_gates(evidence) { PROPAGATION } else { Duration::ZERO },
        }
    }

    /// Whether an order may have been admitted at this time, as far as the window is concerned.
    pub(super) fn may_admit(&self, at: Timestamp) -> bool {
        let skew = self.max_clock_skew;
        let admits = |period: &Period| {
            let is_in_effect = period.from.minus(skew) <= at && at <= period.until.plus(skew).plus(self.gate_lag);
            is_in_effect && period.window.begin <= at && at < period.window.end
        };
        !self.knows_windows || self.periods.iter().any(admits)
    }

    /// The periods whose settings may have decided on an attempt, each with the time of the attempt within it in microseconds.
    fn during(&self, attempt: &Attempt) -> impl Iterator<Item = (&Period, u64, u64)> {
        let skew = self.max_clock_skew;
        let (start_us, end_us) = (attempt.start_us, attempt.end_us);
        self.periods.iter().filter_map(move |period| {
            // A node may give the reason of a moment ago.
            let until_us = history_us(period.until.plus(skew).plus(PROPAGATION));
            let (low, high) = (start_us.max(history_us(period.from.minus(skew))), end_us.min(until_us));
            (low <= high).then_some((period, low, high))
        })
    }

    /// Whether the attempt may have been refused because the sale had not started.
    pub(super) fn may_be_not_started(&self, attempt: &Attempt) -> bool {
        let is_early = |(period, from_us, _): (&Period, u64, u64)| {
            from_us < history_us(period.window.begin.plus(self.max_clock_skew))
        };
        !self.knows_windows || self.during(attempt).any(is_early)
    }

    /// Whether the attempt may have been refused because the sale had ended.
    pub(super) fn may_be_ended(&self, attempt: &Attempt) -> bool {
        let is_late = |(period, _, until_us): (&Period, u64, u64)| {
            period.status == SaleStatus::Ended || until_us >= history_us(period.window.end.minus(self.max_clock_skew))
        };
        !self.knows_windows || self.during(attempt).any(is_late)
    }

    /// Whether the attempt may have been refused because the sale was paused.
    pub(super) fn may_be_paused(&self, attempt: &Attempt) -> bool {
        !self.knows_statuses || self.had_status(attempt, SaleStatus::Paused)
    }

    /// Whether the attempt may have been refused because the sale was a draft.
    pub(super) fn may_be_a_draft(&self, attempt: &Attempt) -> bool {
        self.had_status(attempt, SaleStatus::Draft)
    }

    fn had_status(&self, attempt: &Attempt, status: SaleStatus) -> bool {
        self.during(attempt).any(|(period, ..)| period.status == status)
    }
}
