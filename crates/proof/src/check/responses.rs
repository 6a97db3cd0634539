//! The checks of a recorded history: the responses compared with the ledger's rows.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use stampede_core::ids::{Origin, WorkerId, counter};
use stampede_core::ports::{OrderRow, StockChange};
use stampede_core::{OrderId, OrderStatus, SaleId, SaleStatus, Timestamp, UserId};

use super::findings::{FindingId, Findings};
use super::{Evidence, Rules, history_us};
use crate::history::{Action, Attempt, Response};

/// The attempts at one sale, and the evidence of it.
struct SaleHistory<'a> {
    evidence: &'a Evidence,
    rows: HashMap<OrderId, &'a OrderRow>,
    buys: Vec<&'a Attempt>,
    /// By the order to cancel.
    cancels: HashMap<OrderId, Vec<&'a Attempt>>,
}

/// A history, grouped by sale.
pub(super) struct Responses<'a> {
    sales: Vec<SaleHistory<'a>>,
    /// Sales that the ledger does not have, with the number of attempts that were not refused for that reason.
    absent: Vec<(SaleId, usize)>,
    attempts: usize,
}

impl<'a> Responses<'a> {
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
            SaleHistory { evidence, rows, buys, cancels }
        };
        let sales = evidence.iter().map(&mut at_sale).collect();
        let answered = |attempts: Vec<&Attempt>| attempts.iter().filter(|a| a.response != Response::NoSuchSale).count();
        let absent = by_sale.into_iter().map(|(sale, attempts)| (sale, answered(attempts)));
        Self { sales, absent: absent.filter(|(_, count)| *count > 0).collect(), attempts: history.len() }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.attempts == 0
    }

    /// Refusals by a rate limit cannot be checked: the limits are not recorded.
    pub(super) fn limited(&self) -> Option<String> {
        let limited = self.sales.iter().flat_map(|sale| &sale.buys).filter(|a| a.response == Response::TooManyRequests);
        let count = limited.count();
        (count > 0)
            .then(|| format!("{count} responses with too_many_requests cannot be checked; the others are correct"))
    }

    /// A request that was sent after the response to another has the higher order id, if the same worker created both. Ids from a counter
    /// do not tell who created them, and nodes use what they have fetched for a while: their time may be that much lower.
    pub(super) fn ids_increase(&self, id: SaleId, rules: Rules, findings: &mut Findings) {
        let Some(sale) = self.sales.iter().find(|sale| sale.evidence.ledger.sale.id == id) else { return };
        let mut of: HashMap<OrderId, UserId> = HashMap::new();
        let mut starts: Vec<&Attempt> =
            sale.buys.iter().copied().filter(|attempt| attempt.response == Response::Created).collect();
        starts.sort_unstable_by_key(|attempt| attempt.start_us);
        let mut ends = starts.clone();
        ends.sort_unstable_by_key(|attempt| attempt.end_us);
        let mut ended = ends.into_iter().peekable();
        let mut highest: HashMap<WorkerId, OrderId> = HashMap::new();
        let mut latest: Option<(Timestamp, OrderId)> = None;
        let max_lag = counter::MAX_AGE + COUNTER_LAG + rules.max_clock_skew;
        for attempt in starts {
            let (Some(order), user) = (attempt.order, attempt.user) else { continue };
            if let Some(other) = of.insert(order, user).filter(|other| *other != user) {
                let text = format!("order {order} was confirmed to user {other} and to user {user}");
                findings.add(FindingId::order("shared id", id, order), text);
            }
            while let Some(before) = ended.next_if(|before| before.end_us < attempt.start_us) {
                match before.order.map(|order| (order, origin(before, order))) {
                    Some((order, Origin::Snowflake { worker, .. })) => {
                        let highest = highest.entry(worker).or_insert(order);
                        *highest = order.max(*highest);
                    }
                    Some((order, Origin::Counter { at })) => latest = latest.max(Some((at, order))),
                    None => {}
                }
            }
            let earlier = match origin(attempt, order) {
                Origin::Snowflake { worker, .. } => highest
                    .get(&worker)
                    .filter(|before| **before >= order)
                    .map(|before| format!("order {order} was created after {before}, by the same worker")),
                Origin::Counter { at } => latest.filter(|(before, _)| *before > at.plus(max_lag)).map(|(_, before)| {
                    format!("order {order} was created after {before}, whose id is of a later time")
                }),
            };
            if let Some(text) = earlier {
                findings.add(FindingId::order("id order", id, order), text);
            }
        }
    }
}

/// Besides [`counter::MAX_AGE`]: ids have whole seconds, and the answer that grants one may take a while.
const COUNTER_LAG: Duration = Duration::from_secs(2);

/// The origin of an order that was created by this attempt.
fn origin(attempt: &Attempt, order: OrderId) -> Origin {
    let start_ms = i64::try_from(attempt.start_us / 1000).unwrap_or(i64::MAX);
    Origin::of(order.get(), Timestamp::from_ms(start_ms))
}

impl SaleHistory<'_> {
    fn cancels_of(&self, order: OrderId) -> impl Iterator<Item = &Attempt> {
        self.cancels.get(&order).into_iter().flatten().copied()
    }

    /// Whether the buyer may have cancelled the order.
    fn may_be_cancelled(&self, order: OrderId) -> bool {
        self.cancels_of(order)
            .any(|cancel| matches!(cancel.response, Response::Cancelled | Response::Unknown | Response::Wrong))
    }
}

pub(super) fn confirmed_orders_exist(answers: &Responses<'_>, findings: &mut Findings) {
    for (sale, count) in &answers.absent {
        let text = format!("the history has {count} attempts at sale {sale}, which the ledger does not have");
        findings.add(FindingId::sale("absent", *sale), text);
    }
    for sale in &answers.sales {
        let mut confirmed: HashMap<UserId, OrderId> = HashMap::new();
        for attempt in &sale.buys {
            check_response(sale, attempt, findings);
            let Some(order) = attempt.order.filter(|_| attempt.response.is_confirmation()) else { continue };
            // A repeated attempt returns the same order while that is live.
            if let Some(other) = confirmed.insert(attempt.user, order).filter(|other| *other != order)
                && [other, order].iter().all(|id| sale.rows.get(id).is_some_and(|row| row.live))
            {
                let text = format!("duplicated: user {} got {other} and {order}", attempt.user);
                findings.add(FindingId::order("duplicated", attempt.sale, order), text);
            }
        }
        owners_are_not_refused(sale, findings);
        cancellations_took_effect(sale, findings);
    }
}

fn check_response(sale: &SaleHistory<'_>, attempt: &Attempt, findings: &mut Findings) {
    let (id, user) = (attempt.sale, attempt.user);
    if attempt.response == Response::Wrong {
        let text = format!("sale {id}: user {user} got an invalid response");
        findings.add(FindingId::user("wrong", id, user), text);
    }
    if !attempt.response.is_confirmation() {
        return;
    }
    let Some(order) = attempt.order else {
        return findings.add(
            FindingId::user("no order", id, user),
            format!("sale {id}: user {user} got a confirmation without an order"),
        );
    };
    match sale.rows.get(&order) {
        None => {
            let text = format!("lost: order {order} of user {user} was confirmed and does not exist");
            findings.add(FindingId::order("lost", id, order), text);
        }
        Some(row) if row.order.user != user => {
            let text = format!("order {order} was confirmed to user {user} and belongs to {}", row.order.user);
            findings.add(FindingId::order("owner", id, order), text);
        }
        Some(row) if row.order.status == OrderStatus::Rejected => {
            findings.add(
                FindingId::order("rejected", id, order),
                format!("order {order} of user {user} was confirmed and is rejected"),
            );
        }
        Some(row) if !row.live && !sale.may_be_cancelled(order) => {
            let status = row.order.status.as_str();
            let text = format!("order {order} of user {user} was confirmed and is {status} without a request");
            findings.add(FindingId::order("not live", id, order), text);
        }
        Some(_) => {}
    }
    let cancelled = sale.cancels_of(order).any(|c| c.response == Response::Cancelled && c.end_us < attempt.start_us);
    if cancelled {
        let text = format!("user {user} got order {order} after it had been cancelled");
        findings.add(FindingId::order("returned after cancellation", id, order), text);
    }
}

/// A user with an order gets that order, and never a refusal.
fn owners_are_not_refused(sale: &SaleHistory<'_>, findings: &mut Findings) {
    let mut confirmed: HashMap<UserId, (OrderId, u64)> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.response.is_confirmation()) {
        let Some(order) = attempt.order.filter(|order| sale.cancels_of(*order).next().is_none()) else { continue };
        let first = confirmed.entry(attempt.user).or_insert((order, attempt.end_us));
        first.1 = first.1.min(attempt.end_us);
    }
    for attempt in sale.buys.iter().filter(|attempt| attempt.response.is_gate_refusal()) {
        if let Some((order, since)) = confirmed.get(&attempt.user)
            && *since < attempt.start_us
        {
            let (user, reason) = (attempt.user, attempt.response.as_str());
            let text = format!("user {user} had order {order} and was refused with {reason}");
            findings.add(FindingId::order("refused", attempt.sale, *order), text);
        }
    }
}

fn cancellations_took_effect(sale: &SaleHistory<'_>, findings: &mut Findings) {
    let confirmed: HashSet<(UserId, OrderId)> = sale
        .buys
        .iter()
        .filter(|attempt| attempt.response.is_confirmation())
        .filter_map(|attempt| Some((attempt.user, attempt.order?)))
        .collect();
    let id = sale.evidence.ledger.sale.id;
    for (&order, cancels) in &sale.cancels {
        let live = sale.rows.get(&order).is_none_or(|row| row.live);
        if live && cancels.iter().any(|cancel| cancel.response == Response::Cancelled) {
            findings.add(
                FindingId::order("not cancelled", id, order),
                format!("order {order} was cancelled and is still live"),
            );
        }
        let refused = |cancel: &&Attempt| matches!(cancel.response, Response::IllegalStep | Response::NoSuchOrder);
        if cancels.iter().all(refused) && cancels.iter().any(|c| confirmed.contains(&(c.user, order))) {
            let text = format!("order {order} was confirmed and cannot be cancelled");
            findings.add(FindingId::order("no cancel", id, order), text);
        }
    }
}

pub(super) fn orders_were_requested(answers: &Responses<'_>, findings: &mut Findings) {
    for sale in &answers.sales {
        let named: HashSet<OrderId> = sale
            .buys
            .iter()
            .filter(|attempt| attempt.response.is_confirmation())
            .filter_map(|attempt| attempt.order)
            .collect();
        let unknown = |attempt: &&&Attempt| matches!(attempt.response, Response::Unknown | Response::Wrong);
        let unknown: HashSet<UserId> = sale.buys.iter().filter(unknown).map(|attempt| attempt.user).collect();
        for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
            let (order, user) = (row.order.id, row.order.user);
            if !named.contains(&order) && !unknown.contains(&user) {
                let text = format!("unexpected: order {order} of user {user} was never requested");
                findings.add(FindingId::order("unexpected", sale.evidence.ledger.sale.id, order), text);
            }
        }
    }
}

/// How long after a cancellation or a top-up another node may still respond with sold out.
const PROPAGATION_US: u64 = 5_000_000;

pub(super) fn sold_out_was_correct(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    let propagation_us = PROPAGATION_US + u64::try_from(rules.max_clock_skew.as_micros()).unwrap_or(u64::MAX);
    for sale in &answers.sales {
        let (starts, ends) = holding_periods(sale);
        let ledger = &sale.evidence.ledger;
        let changes = &ledger.stock_changes;
        let initial = i64::from(ledger.sale.total) - changes.iter().map(|change| change.added).sum::<i64>();
        let skew_us = u64::try_from(rules.max_clock_skew.as_micros()).unwrap_or(u64::MAX);
        let in_flight = RefusedInFlight::new(sale);
        for attempt in sale.buys.iter().filter(|attempt| attempt.response == Response::SoldOut) {
            let long_before = attempt.start_us.saturating_sub(propagation_us);
            let soon_after = attempt.end_us.saturating_add(skew_us);
            // A top-up counts once every node knows of it, a reduction as soon as the gate may have it.
            let counts = |change: &&StockChange| match change.added {
                0.. => history_us(change.asked_at) <= long_before,
                _ => history_us(change.asked_at) <= soon_after,
            };
            let added: i64 = changes.iter().filter(counts).map(|change| change.added).sum();
            let total = u64::try_from(initial + added).unwrap_or_default();
            let taken = starts.partition_point(|&start| start <= attempt.end_us)
                - ends.partition_point(|&end| end < long_before)
                + in_flight.beside(attempt);
            if (taken as u64) < total {
                let (user, id) = (attempt.user, attempt.sale);
                let text = format!("sale {id}: user {user} got sold out when at most {taken} of {total} were sold");
                findings.add(FindingId::user("sold out", id, user), text);
            }
        }
    }
}

/// Attempts that held a mark in the gate of their node until the ledger refused them, because another node had sold the stock. That
/// happens only if the nodes have gates of their own. Which of the refused attempts these were is not known, so all of them count.
struct RefusedInFlight {
    /// Sorted; empty if there is one gate.
    starts: Vec<u64>,
    ends: Vec<u64>,
}

impl RefusedInFlight {
    fn new(sale: &SaleHistory<'_>) -> Self {
        let gates = &sale.evidence.gates;
        let are_apart = gates.len() > 1 && gates.iter().all(|gate| gate.outbox.is_none());
        let refused = sale.buys.iter().filter(|attempt| are_apart && attempt.response == Response::SoldOut);
        let (mut starts, mut ends): (Vec<u64>, Vec<u64>) =
            refused.map(|attempt| (attempt.start_us, attempt.end_us)).unzip();
        starts.sort_unstable();
        ends.sort_unstable();
        Self { starts, ends }
    }

    /// How many others there were during this refused attempt.
    fn beside(&self, attempt: &Attempt) -> usize {
        let begun = self.starts.partition_point(|&start| start <= attempt.end_us);
        let ended = self.ends.partition_point(|&end| end < attempt.start_us);
        (begun - ended).saturating_sub(1)
    }
}

/// When each user may have got an order, and when it was certainly returned; both sorted.
fn holding_periods(sale: &SaleHistory<'_>) -> (Vec<u64>, Vec<u64>) {
    let mut events: HashMap<UserId, Vec<(u64, bool)>> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.response.may_have_created()) {
        events.entry(attempt.user).or_default().push((attempt.start_us, true));
    }
    let first = sale.buys.iter().map(|attempt| attempt.start_us).min().unwrap_or(0);
    for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
        // The order is older than the history.
        let created = history_us(row.order.created_at);
        if created < first {
            events.entry(row.order.user).or_default().push((created, true));
        }
    }
    let mut buys: HashMap<UserId, Vec<&Attempt>> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.response.may_have_created()) {
        buys.entry(attempt.user).or_default().push(attempt);
    }
    for cancel in sale.cancels.values().flatten().filter(|cancel| cancel.response == Response::Cancelled) {
        // A concurrent attempt to buy may have got an order again.
        let concurrent = |buy: &&Attempt| buy.start_us <= cancel.end_us && buy.end_us >= cancel.start_us;
        if !buys.get(&cancel.user).into_iter().flatten().any(concurrent) {
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

pub(super) fn refusals_were_correct(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    for sale in &answers.sales {
        let ledger = &sale.evidence.ledger;
        let (status, window, apart) = (ledger.sale.status, ledger.sale.window, rules.max_clock_skew);
        // Every edit increments the version, and an edit that does not change the stock changes the status.
        let of_stock = ledger.stock_changes.iter().filter(|change| change.is_edit).count();
        let of_stock = i64::try_from(of_stock).unwrap_or(i64::MAX);
        let never_paused = ledger.sale.version <= 1 + of_stock && sale.evidence.from_database;
        for attempt in &sale.buys {
            let incorrect = match attempt.response {
                Response::NotStarted => attempt.start_us >= history_us(window.begin.plus(apart)),
                Response::Ended => status != SaleStatus::Ended && attempt.end_us < history_us(window.end.minus(apart)),
                Response::Paused => never_paused,
                Response::NoSuchSale => status != SaleStatus::Draft,
                Response::Unauthorized | Response::Cancelled | Response::IllegalStep | Response::NoSuchOrder => true,
                // Whether the sale was sold out is checked from the times of all orders.
                Response::SoldOut | Response::TooManyRequests => false,
                Response::Created | Response::Already | Response::Pending | Response::Unknown | Response::Wrong => {
                    false
                }
            };
            if incorrect {
                let (id, user, reason) = (attempt.sale, attempt.user, attempt.response.as_str());
                let text = format!("sale {id}: user {user} was refused with {reason} incorrectly");
                findings.add(FindingId::user(reason, id, user), text);
            }
        }
    }
}
