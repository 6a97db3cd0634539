//! The checks of a recorded history: the responses compared with the ledger's rows.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use stampede_core::ids::{Origin, WorkerId, counter};
use stampede_core::ports::{OrderRow, StockChange};
use stampede_core::{Order, OrderId, OrderStatus, SaleId, Timestamp, UserId};

use super::findings::{FindingId, Findings};
use super::settings::{Settings, has_several_gates};
use super::steps::{ended_at, has_ended_unasked, late_payments};
use super::{Backlog, Evidence, Rules, history_us};
use crate::history::{Action, Attempt, Response};

/// How long after the time of the step that has ended an order a response may still name it. That time is read before the transaction, which
/// may wait for locks, or run in a process that is paused.
const MAX_STEP_LAG: Duration = Duration::from_secs(60);

/// The attempts at one sale, and the evidence of it.
struct SaleHistory<'a> {
    evidence: &'a Evidence,
    rows: HashMap<OrderId, &'a OrderRow>,
    /// When each dead order ended, by the ledger.
    ended: HashMap<OrderId, Timestamp>,
    /// Orders with marks, of gates that differ from the ledger.
    marked: HashSet<OrderId>,
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
            let owners = evidence.gates.iter().filter_map(|gate| gate.view.as_ref()?.owners.as_ref());
            let marked = owners.flatten().map(|(_, order)| *order).collect();
            SaleHistory { evidence, rows, ended: ended_at(&evidence.ledger), marked, buys, cancels }
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

    /// Where an order may be that has no row; `None` if it must have one. An accepted order holds a mark until it has a row.
    fn on_its_way(&self, attempt: &Attempt, order: OrderId, rules: Rules) -> Option<Backlog> {
        let is_held = self.evidence.gates.is_empty() || self.marked.contains(&order);
        self.evidence.on_their_way(rules).filter(|_| is_held && attempt.response == Response::Pending)
    }
}

pub(super) fn confirmed_orders_exist(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    for (sale, count) in &answers.absent {
        let text = format!("the history has {count} attempts at sale {sale}, which the ledger does not have");
        findings.add(FindingId::sale("absent", *sale), text);
    }
    for sale in &answers.sales {
        let mut confirmed: HashMap<UserId, OrderId> = HashMap::new();
        for attempt in &sale.buys {
            check_response(sale, attempt, rules, findings);
            let Some(order) = attempt.order.filter(|_| attempt.response.is_confirmation()) else { continue };
            // A repeated attempt returns the same order while that is live.
            if let Some(other) = confirmed.insert(attempt.user, order).filter(|other| *other != order)
                && [other, order].iter().all(|id| sale.rows.get(id).is_some_and(|row| row.live))
            {
                let text = format!("duplicated: user {} got {other} and {order}", attempt.user);
                findings.add(FindingId::order("duplicated", attempt.sale, order), text);
            }
        }
        owners_are_not_refused(sale, rules, findings);
        earlier_orders_are_not_returned(sale, findings);
        cancellations_took_effect(sale, findings);
    }
}

fn check_response(sale: &SaleHistory<'_>, attempt: &Attempt, rules: Rules, findings: &mut Findings) {
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
            let on_its_way = sale.on_its_way(attempt, order, rules);
            findings.add_without_row(FindingId::order("lost", id, order), text, on_its_way);
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
        Some(row) if !row.live && !has_ended_unasked(row) && !sale.may_be_cancelled(order) => {
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
    let is_long_ago = |at: &&Timestamp| history_us(at.plus(MAX_STEP_LAG + rules.max_clock_skew)) < attempt.start_us;
    if sale.ended.get(&order).filter(is_long_ago).is_some() {
        let text = format!("user {user} got order {order} long after it had ended");
        findings.add(FindingId::order("returned after its end", id, order), text);
    }
}

/// A period in which a user certainly had an order: from the end of the first response that confirmed it.
struct Holding {
    order: OrderId,
    since_us: u64,
    until_us: u64,
}

impl SaleHistory<'_> {
    /// Until when an order was certainly live, once it was confirmed.
    fn live_until(&self, order: OrderId, rules: Rules) -> u64 {
        let first_cancel = || self.cancels_of(order).map(|cancel| cancel.start_us).min().unwrap_or(u64::MAX);
        match self.rows.get(&order) {
            // A dead order never becomes live again.
            Some(row) if row.live => u64::MAX,
            // The time of a step is read before its transaction.
            Some(_) if self.evidence.from_database => {
                let ended = self.ended.get(&order).map(|at| history_us(at.minus(rules.max_clock_skew)));
                first_cancel().min(ended.unwrap_or(u64::MAX))
            }
            // The row alone does not say when the order ended.
            Some(row) if has_ended_unasked(row) => 0,
            Some(_) | None => first_cancel(),
        }
    }

    /// The orders of each user that were confirmed, with the periods in which they certainly had them.
    fn holdings(&self, rules: Rules) -> HashMap<UserId, Vec<Holding>> {
        let mut first: HashMap<(UserId, OrderId), u64> = HashMap::new();
        for attempt in self.buys.iter().filter(|attempt| attempt.response.is_confirmation()) {
            let Some(order) = attempt.order else { continue };
            let end_us = first.entry((attempt.user, order)).or_insert(attempt.end_us);
            *end_us = attempt.end_us.min(*end_us);
        }
        // Stock has come back in a sale with an order that has ended. A node may then still refuse as before, until it knows of that.
        let delay_us = propagation_us(rules);
        let mut holdings: HashMap<UserId, Vec<Holding>> = HashMap::new();
        for ((user, order), confirmed_us) in first {
            let has_ended = self.rows.get(&order).is_some_and(|row| !row.live);
            let since_us = if has_ended { confirmed_us.saturating_add(delay_us) } else { confirmed_us };
            let until_us = self.live_until(order, rules);
            holdings.entry(user).or_default().push(Holding { order, since_us, until_us });
        }
        holdings
    }
}

/// How long after stock has come back a node may still refuse as before, in the microseconds of a history.
fn propagation_us(rules: Rules) -> u64 {
    u64::try_from((rules.max_sold_out_delay + rules.max_clock_skew).as_micros()).unwrap_or(u64::MAX)
}

/// A user with an order gets that order, and never a refusal.
fn owners_are_not_refused(sale: &SaleHistory<'_>, rules: Rules, findings: &mut Findings) {
    let holdings = sale.holdings(rules);
    let is_refusal = |response: Response| response.is_gate_refusal() || response == Response::BoughtBefore;
    for attempt in sale.buys.iter().filter(|attempt| is_refusal(attempt.response)) {
        let is_held = |held: &&Holding| held.since_us < attempt.start_us && attempt.end_us < held.until_us;
        if let Some(Holding { order, .. }) = holdings.get(&attempt.user).into_iter().flatten().find(is_held) {
            let (user, reason) = (attempt.user, attempt.response.as_str());
            let text = format!("user {user} had order {order} and was refused with {reason}");
            findings.add(FindingId::order("refused", attempt.sale, *order), text);
        }
    }
}

/// A user has one live order at a time. So an order has ended once another one was confirmed to its user by a request that was sent after the
/// first response with it, and a request that is sent later does not get it any more.
fn earlier_orders_are_not_returned(sale: &SaleHistory<'_>, findings: &mut Findings) {
    let is_recorded =
        |order: &OrderId| sale.rows.get(order).is_some_and(|row| row.order.status != OrderStatus::Rejected);
    let mut of: HashMap<UserId, Vec<(OrderId, &Attempt)>> = HashMap::new();
    for attempt in sale.buys.iter().copied().filter(|attempt| attempt.response.is_confirmation()) {
        if let Some(order) = attempt.order.filter(is_recorded) {
            of.entry(attempt.user).or_default().push((order, attempt));
        }
    }
    for (user, confirmed) in of {
        let mut first: HashMap<OrderId, u64> = HashMap::new();
        for (order, attempt) in &confirmed {
            let end_us = first.entry(*order).or_insert(attempt.end_us);
            *end_us = attempt.end_us.min(*end_us);
        }
        if first.len() == 1 {
            continue;
        }
        for (order, attempt) in &confirmed {
            let is_between = |(other, between): &&(OrderId, &Attempt)| {
                other != order && first[order] < between.start_us && between.end_us < attempt.start_us
            };
            if let Some((other, _)) = confirmed.iter().find(is_between) {
                let text = format!("user {user} got order {order} after order {other}, which is a later one");
                findings.add(FindingId::order("returned after another", attempt.sale, *order), text);
            }
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

pub(super) fn orders_were_requested(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    for sale in &answers.sales {
        let named: HashSet<OrderId> = sale
            .buys
            .iter()
            .filter(|attempt| attempt.response.is_confirmation())
            .filter_map(|attempt| attempt.order)
            .collect();
        let unknown = |attempt: &&&Attempt| matches!(attempt.response, Response::Unknown | Response::Wrong);
        let unknown: HashSet<UserId> = sale.buys.iter().filter(unknown).map(|attempt| attempt.user).collect();
        let late = late_payments(&sale.evidence.ledger);
        let is_readmitted = |order: &Order| {
            let since = order.created_at.plus(rules.max_clock_skew);
            late.iter().any(|(user, received_at)| *user == order.user && *received_at <= since)
        };
        for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
            let (order, user) = (row.order.id, row.order.user);
            if !named.contains(&order) && !unknown.contains(&user) && !is_readmitted(&row.order) {
                let text = format!("unexpected: order {order} of user {user} was never requested");
                findings.add(FindingId::order("unexpected", sale.evidence.ledger.sale.id, order), text);
            }
        }
    }
}

pub(super) fn sold_out_was_correct(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    let propagation_us = propagation_us(rules);
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
        let are_apart = has_several_gates(sale.evidence);
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
    let late: HashSet<UserId> = late_payments(&sale.evidence.ledger).into_iter().map(|(user, _)| user).collect();
    for row in sale.evidence.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected) {
        // The order is older than the history, or may have been made for a late payment.
        let created = history_us(row.order.created_at);
        if created < first || late.contains(&row.order.user) {
            events.entry(row.order.user).or_default().push((created, true));
        }
    }
    let mut buys: HashMap<UserId, Vec<&Attempt>> = HashMap::new();
    for attempt in sale.buys.iter().filter(|attempt| attempt.response.may_have_created()) {
        buys.entry(attempt.user).or_default().push(attempt);
    }
    let cancels = sale.cancels.values().flatten().filter(|cancel| cancel.response == Response::Cancelled);
    let cancelled = cancels.map(|cancel| (cancel.user, cancel.start_us, cancel.end_us));
    let expired = sale.evidence.ledger.orders.iter().filter(|row| has_ended_unasked(row));
    let expired = expired.filter_map(|row| {
        let at = history_us(*sale.ended.get(&row.order.id)?);
        Some((row.order.user, at, at))
    });
    for (user, from, until) in cancelled.chain(expired) {
        // A concurrent attempt to buy may have got an order again.
        let concurrent = |buy: &&Attempt| buy.start_us <= until && buy.end_us >= from;
        if !buys.get(&user).into_iter().flatten().any(concurrent) {
            events.entry(user).or_default().push((until, false));
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

/// Whether the user had an order before the end of this attempt, in a sale in which nobody may buy again.
fn may_not_buy_again(sale: &SaleHistory<'_>, attempt: &Attempt) -> bool {
    let ledger = &sale.evidence.ledger;
    let mut ended = ledger.orders.iter().filter(|row| !row.live && row.order.status != OrderStatus::Rejected);
    !ledger.sale.buy_again
        && ended.any(|row| row.order.user == attempt.user && history_us(row.order.created_at) <= attempt.end_us)
}

pub(super) fn refusals_were_correct(answers: &Responses<'_>, rules: Rules, findings: &mut Findings) {
    for sale in &answers.sales {
        let settings = Settings::of(sale.evidence, rules);
        for attempt in &sale.buys {
            let incorrect = match attempt.response {
                Response::NotStarted => !settings.may_be_not_started(attempt),
                Response::Ended => !settings.may_be_ended(attempt),
                Response::Paused => !settings.may_be_paused(attempt),
                Response::NoSuchSale => !settings.may_be_a_draft(attempt),
                Response::BoughtBefore => !may_not_buy_again(sale, attempt),
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
