//! What a recorded history adds: the answers against the ledger's rows.

use std::collections::{HashMap, HashSet};

use stampede_core::ids::{Snowflake, WorkerId};
use stampede_core::ports::OrderRow;
use stampede_core::{OrderId, OrderStatus, SaleId, SaleStatus, UserId};

use super::findings::Findings;
use super::{Evidence, Rules, history_us};
use crate::history::{Action, Attempt, Heard};

/// The attempts at one sale, and what the ledger has of it.
struct AtSale<'a> {
    evidence: &'a Evidence,
    rows: HashMap<OrderId, &'a OrderRow>,
    buys: Vec<&'a Attempt>,
    /// By the order that was to be cancelled.
    cancels: HashMap<OrderId, Vec<&'a Attempt>>,
}

/// A whole history, by sale.
pub(super) struct Answers<'a> {
    sales: Vec<AtSale<'a>>,
    /// Sales that the ledger does not have, with the number of attempts that were not refused because of that.
    absent: Vec<(SaleId, usize)>,
    attempts: usize,
}

impl<'a> Answers<'a> {
    pub(super) fn group(history: &'a [Attempt], evidence: &'a [Evidence]) -> Self {
        let mut by_sale: HashMap<SaleId, Vec<&Attempt>> = HashMap::new();
        for attempt in history {
            by_sale.entry(attempt.sale).or_default().push(attempt);
        }
        let mut at_sale = |evidence: &'a Evidence| {
            let rows = evidence.ledger.orders.iter().map(|row| (row.order.id, row)).collect();
            let (mut buys, mut cancels) = (Vec::new(), HashMap::<OrderId, Vec<&Attempt>>::new());
            for attempt in by_sale.remove(&evidence.ledger.sale.id).unwrap_or_default() {
                match (attempt.action, attempt.order) {
                    (Action::Buy, _) => buys.push(attempt),
                    (Action::Cancel, Some(order)) => cancels.entry(order).or_default().push(attempt),
                    (Action::Cancel, None) => {}
                }
            }
            AtSale { evidence, rows, buys, cancels }
        };
        let sales = evidence.iter().map(&mut at_sale).collect();
        let answered = |attempts: Vec<&Attempt>| attempts.iter().filter(|a| a.heard != Heard::NoSuchSale).count();
        let absent = by_sale.into_iter().map(|(sale, attempts)| (sale, answered(attempts)));
        Self { sales, absent: absent.filter(|(_, count)| *count > 0).collect(), attempts: history.len() }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.attempts == 0
    }

    /// Refusals by a limit cannot be judged: the limits are not on record.
    pub(super) fn limited(&self) -> Option<String> {
        let limited = self.sales.iter().flat_map(|sale| &sale.buys).filter(|a| a.heard == Heard::TooManyRequests);
        let count = limited.count();
        (count > 0).then(|| format!("{count} answers of too_many_requests cannot be judged; the others are true"))
    }

    /// A request that was sent after another was answered has the higher id, if both came from the same maker.
    pub(super) fn ids_rise(&self, id: SaleId, findings: &mut Findings) {
        let Some(sale) = self.sales.iter().find(|sale| sale.evidence.ledger.sale.id == id) else { return };
        let mut of: HashMap<OrderId, UserId> = HashMap::new();
        let mut starts: Vec<&Attempt> =
            sale.buys.iter().copied().filter(|attempt| attempt.heard == Heard::Created).collect();
        starts.sort_unstable_by_key(|attempt| attempt.start_us);
        let mut ends = starts.clone();
        ends.sort_unstable_by_key(|attempt| attempt.end_us);
        let mut ended = ends.into_iter().peekable();
        let mut highest: HashMap<WorkerId, OrderId> = HashMap::new();
        for attempt in starts {
            let (Some(order), user) = (attempt.order, attempt.user) else { continue };
            if let Some(other) = of.insert(order, user).filter(|other| *other != user) {
                let text = format!("order {order} was told to user {other} and to user {user}");
                findings.add(("shared id", 0, order.get()), text);
            }
            while let Some(before) = ended.next_if(|before| before.end_us < attempt.start_us) {
                if let Some(id) = before.order {
                    let highest = highest.entry(Snowflake::maker(id.get())).or_insert(id);
                    *highest = id.max(*highest);
                }
            }
            if let Some(before) = highest.get(&Snowflake::maker(order.get())).filter(|before| **before >= order) {
                let text = format!("order {order} was made after {before}, by the same maker");
                findings.add(("id order", 0, order.get()), text);
            }
        }
    }
}

impl AtSale<'_> {
    fn cancels_of(&self, order: OrderId) -> impl Iterator<Item = &Attempt> {
        self.cancels.get(&order).into_iter().flatten().copied()
    }

    /// May the buyer have cancelled it?
    fn may_be_cancelled(&self, order: OrderId) -> bool {
        self.cancels_of(order).any(|cancel| matches!(cancel.heard, Heard::Cancelled | Heard::Unknown | Heard::Wrong))
    }
}

pub(super) fn every_yes_has_its_row(answers: &Answers<'_>, findings: &mut Findings) {
    for (sale, count) in &answers.absent {
        let text = format!("the history has {count} attempts at sale {sale}, which the ledger does not have");
        findings.add(("absent", 0, sale.get()), text);
    }
    for sale in &answers.sales {
        let mut yes: HashMap<UserId, OrderId> = HashMap::new();
        for attempt in &sale.buys {
            judge_answer(sale, attempt, findings);
            let Some(order) = attempt.order.filter(|_| attempt.heard.is_yes()) else { continue };
            // Asking again gives the same order, as long as it lives.
            if let Some(other) = yes.insert(attempt.user, order).filter(|other| *other != order)
                && [other, order].iter().all(|id| sale.rows.get(id).is_some_and(|row| row.live))
            {
                let text = format!("duplicated: user {} was told {other} and {order}", attempt.user);
                findings.add(("duplicated", 0, order.get()), text);
            }
        }
        owners_are_not_refused(sale, findings);
        cancels_were_done(sale, findings);
    }
}

fn judge_answer(sale: &AtSale<'_>, attempt: &Attempt, findings: &mut Findings) {
    let (id, user) = (attempt.sale, attempt.user);
    if attempt.heard == Heard::Wrong {
        let text = format!("sale {id}: user {user} got an answer that nobody should get");
        findings.add(("wrong", 0, user.get()), text);
    }
    if !attempt.heard.is_yes() {
        return;
    }
    let Some(order) = attempt.order else {
        return findings.add(("no order", 0, user.get()), format!("sale {id}: user {user} got a yes without an order"));
    };
    let key = order.get();
    match sale.rows.get(&order) {
        None => {
            let text = format!("lost: order {order} of user {user} was confirmed and is not there");
            findings.add(("lost", 0, key), text);
        }
        Some(row) if row.order.user != user => {
            let text = format!("order {order} was told to user {user} and belongs to {}", row.order.user);
            findings.add(("owner", 0, key), text);
        }
        Some(row) if row.order.status == OrderStatus::Rejected => {
            findings.add(("rejected", 0, key), format!("order {order} of user {user} was confirmed and is rejected"));
        }
        Some(row) if !row.live && !sale.may_be_cancelled(order) => {
            let status = row.order.status.as_str();
            let text = format!("order {order} of user {user} was confirmed, is {status}, and nobody asked for that");
            findings.add(("died", 0, key), text);
        }
        Some(_) => {}
    }
    let dead = sale.cancels_of(order).any(|c| c.heard == Heard::Cancelled && c.end_us < attempt.start_us);
    if dead {
        let text = format!("user {user} was told order {order} after it had been cancelled");
        findings.add(("dead", 0, key), text);
    }
}

/// A user who has an order gets it back, whatever else is true: never a refusal.
fn owners_are_not_refused(sale: &AtSale<'_>, findings: &mut Findings) {
    let mut told: HashMap<UserId, (OrderId, u64)> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.heard.is_yes()) {
        let Some(order) = attempt.order.filter(|order| sale.cancels_of(*order).next().is_none()) else { continue };
        let first = told.entry(attempt.user).or_insert((order, attempt.end_us));
        first.1 = first.1.min(attempt.end_us);
    }
    let refused = |attempt: &&&Attempt| {
        matches!(attempt.heard, Heard::SoldOut | Heard::NotStarted | Heard::Ended | Heard::Paused)
    };
    for attempt in sale.buys.iter().filter(refused) {
        if let Some((order, since)) = told.get(&attempt.user)
            && *since < attempt.start_us
        {
            let (user, reason) = (attempt.user, attempt.heard.as_str());
            let text = format!("user {user} had order {order} and was refused with {reason}");
            findings.add(("refused", 0, order.get()), text);
        }
    }
}

fn cancels_were_done(sale: &AtSale<'_>, findings: &mut Findings) {
    let confirmed: HashSet<(UserId, OrderId)> = sale
        .buys
        .iter()
        .filter(|attempt| attempt.heard.is_yes())
        .filter_map(|attempt| Some((attempt.user, attempt.order?)))
        .collect();
    for (&order, cancels) in &sale.cancels {
        let live = sale.rows.get(&order).is_none_or(|row| row.live);
        if live && cancels.iter().any(|cancel| cancel.heard == Heard::Cancelled) {
            findings.add(("not cancelled", 0, order.get()), format!("order {order} was cancelled and is still live"));
        }
        let refused = |cancel: &&Attempt| matches!(cancel.heard, Heard::IllegalStep | Heard::NoSuchOrder);
        if cancels.iter().all(refused) && cancels.iter().any(|c| confirmed.contains(&(c.user, order))) {
            let text = format!("order {order} was confirmed and cannot be cancelled");
            findings.add(("no cancel", 0, order.get()), text);
        }
    }
}

pub(super) fn every_row_has_its_attempt(answers: &Answers<'_>, findings: &mut Findings) {
    for sale in &answers.sales {
        let named: HashSet<OrderId> =
            sale.buys.iter().filter(|attempt| attempt.heard.is_yes()).filter_map(|attempt| attempt.order).collect();
        let unsure = |attempt: &&&Attempt| matches!(attempt.heard, Heard::Unknown | Heard::Wrong);
        let unsure: HashSet<UserId> = sale.buys.iter().filter(unsure).map(|attempt| attempt.user).collect();
        for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
            let (order, user) = (row.order.id, row.order.user);
            if !named.contains(&order) && !unsure.contains(&user) {
                let text = format!("unexpected: order {order} of user {user}, who was never told of it");
                findings.add(("unexpected", 0, order.get()), text);
            }
        }
    }
}

/// How long after a cancellation or a top-up was answered another node may still say sold out.
const LEARNT_WITHIN_US: u64 = 5_000_000;

pub(super) fn sold_out_was_true(answers: &Answers<'_>, rules: Rules, findings: &mut Findings) {
    let learnt_us = LEARNT_WITHIN_US + u64::try_from(rules.clocks_apart.as_micros()).unwrap_or(u64::MAX);
    for sale in &answers.sales {
        let (starts, ends) = holds(sale);
        let ledger = &sale.evidence.ledger;
        let topped_up: u64 = ledger.top_ups.iter().map(|top_up| u64::from(top_up.added)).sum();
        for attempt in sale.buys.iter().filter(|attempt| attempt.heard == Heard::SoldOut) {
            let long_before = attempt.start_us.saturating_sub(learnt_us);
            let added = ledger.top_ups.iter().filter(|top_up| history_us(top_up.at) <= long_before);
            let added: u64 = added.map(|top_up| u64::from(top_up.added)).sum();
            let total = u64::from(ledger.sale.total).saturating_sub(topped_up) + added;
            let taken = starts.partition_point(|&start| start <= attempt.end_us)
                - ends.partition_point(|&end| end < long_before);
            if (taken as u64) < total {
                let (user, id) = (attempt.user, attempt.sale);
                let text =
                    format!("sale {id}: user {user} was told sold out when at most {taken} of {total} were gone");
                findings.add(("sold out", 0, user.get()), text);
            }
        }
    }
}

/// When each user may have begun to hold one, and when it was given back for sure; both sorted.
fn holds(sale: &AtSale<'_>) -> (Vec<u64>, Vec<u64>) {
    let mut events: HashMap<UserId, Vec<(u64, bool)>> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.heard.may_have_row()) {
        events.entry(attempt.user).or_default().push((attempt.start_us, true));
    }
    let first = sale.buys.iter().map(|attempt| attempt.start_us).min().unwrap_or(0);
    for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
        // An order from before the history began.
        let created = history_us(row.order.created_at);
        if created < first {
            events.entry(row.order.user).or_default().push((created, true));
        }
    }
    let mut buys: HashMap<UserId, Vec<&Attempt>> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.heard.may_have_row()) {
        buys.entry(attempt.user).or_default().push(attempt);
    }
    for cancel in sale.cancels.values().flatten().filter(|cancel| cancel.heard == Heard::Cancelled) {
        // An attempt to buy at the same time may have taken one again.
        let at_once = |buy: &&Attempt| buy.start_us <= cancel.end_us && buy.end_us >= cancel.start_us;
        if !buys.get(&cancel.user).into_iter().flatten().any(at_once) {
            events.entry(cancel.user).or_default().push((cancel.end_us, false));
        }
    }
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    for (_, mut events) in events {
        events.sort_unstable();
        let mut holding = false;
        for (at, takes) in events {
            match (holding, takes) {
                (false, true) => starts.push(at),
                (true, false) => ends.push(at),
                _ => {}
            }
            holding = takes;
        }
    }
    starts.sort_unstable();
    ends.sort_unstable();
    (starts, ends)
}

pub(super) fn refusals_were_true(answers: &Answers<'_>, rules: Rules, findings: &mut Findings) {
    for sale in &answers.sales {
        let ledger = &sale.evidence.ledger;
        let (status, window, apart) = (ledger.sale.status, ledger.sale.window, rules.clocks_apart);
        // Every edit raises the version. What is not a top-up was a change of the status.
        let top_ups = i64::try_from(ledger.top_ups.len()).unwrap_or(i64::MAX);
        let never_paused = ledger.sale.ver <= 1 + top_ups && sale.evidence.from_database;
        for attempt in &sale.buys {
            let wrong = match attempt.heard {
                Heard::NotStarted => attempt.start_us >= history_us(window.begin.plus(apart)),
                Heard::Ended => status != SaleStatus::Ended && attempt.end_us < history_us(window.end.minus(apart)),
                Heard::Paused => never_paused,
                Heard::NoSuchSale => status != SaleStatus::Draft,
                Heard::Unauthorized | Heard::Cancelled | Heard::IllegalStep | Heard::NoSuchOrder => true,
                _ => false,
            };
            if wrong {
                let (id, user, reason) = (attempt.sale, attempt.user, attempt.heard.as_str());
                let text = format!("sale {id}: user {user} was refused with {reason}, which was not true");
                findings.add((reason, 0, user.get()), text);
            }
        }
    }
}
