//! The checks of the ledger and the gates.

use std::collections::{HashMap, HashSet};

use stampede_core::ids::Origin;
use stampede_core::ports::{OrderRow, SaleRecords};
use stampede_core::{Epoch, OrderId, OrderStatus, Timestamp, UserId, mark_digest};

use super::findings::{FindingId, Findings};
use super::settings::Settings;
use super::steps::ended_at;
use super::{Backlog, Evidence, GateView, NodeGate, Rules};

fn live(sale: &Evidence) -> impl Iterator<Item = &OrderRow> {
    sale.ledger.orders.iter().filter(|row| row.live)
}

fn admitted(sale: &Evidence) -> impl Iterator<Item = &OrderRow> {
    sale.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected)
}

pub(super) fn ledger_counts_match(evidence: &Evidence, findings: &mut Findings) {
    let (sale, id) = (&evidence.ledger.sale, evidence.ledger.sale.id.get());
    let live = live(evidence).count();
    if sale.sold as usize != live {
        findings
            .add(FindingId::sale("sold", sale.id), format!("sale {id}: sold is {}, live rows are {live}", sale.sold));
    }
    if live > sale.total as usize {
        findings.add(
            FindingId::sale("oversold", sale.id),
            format!("sale {id}: {live} live rows of {}: oversold", sale.total),
        );
    }
    if sale.cap != sale.total {
        findings
            .add(FindingId::sale("cap", sale.id), format!("sale {id}: cap is {}, total is {}", sale.cap, sale.total));
    }
}

/// Every mark that a gate should have: live orders, and quarantined ones without a row.
fn owners(ledger: &SaleRecords) -> Vec<(UserId, OrderId)> {
    let rows: HashSet<OrderId> = ledger.orders.iter().map(|row| row.order.id).collect();
    let quarantined = ledger.quarantine.iter().filter(|(_, order)| !rows.contains(order));
    let live = ledger.orders.iter().filter(|row| row.live);
    live.map(|row| (row.order.user, row.order.id)).chain(quarantined.copied()).collect()
}

impl GateView {
    /// Whether the gate has exactly the expected marks, judged by their digest.
    pub(crate) fn matches(&self, ledger: &SaleRecords) -> bool {
        let owners = owners(ledger);
        self.marks as usize == owners.len() && self.digest == mark_digest(owners.into_iter())
    }
}

pub(super) fn gates_match_ledger(evidence: &Evidence, now: Timestamp, rules: Rules, findings: &mut Findings) {
    let owners = owners(&evidence.ledger);
    // With several nodes, at least the node that sold an order has its mark.
    let listed: Vec<&Vec<(UserId, OrderId)>> =
        evidence.gates.iter().filter_map(|gate| gate.view.as_ref()?.owners.as_ref()).collect();
    if evidence.gates.len() > 1 && listed.len() == evidence.gates.len() {
        let held: HashSet<OrderId> = listed.into_iter().flatten().map(|(_, order)| *order).collect();
        for (user, order) in owners.iter().filter(|(_, order)| !held.contains(order)) {
            findings.add(
                FindingId::order("nowhere", evidence.ledger.sale.id, *order),
                format!("no gate has a mark of order {order} of user {user}"),
            );
        }
    }
    for (n, gate) in evidence.gates.iter().enumerate() {
        gate_matches_ledger(evidence, n, gate, &owners, now, rules, findings);
    }
}

fn gate_matches_ledger(
    evidence: &Evidence,
    n: usize,
    NodeGate { node, view, .. }: &NodeGate,
    owners: &[(UserId, OrderId)],
    now: Timestamp,
    rules: Rules,
    findings: &mut Findings,
) {
    let sale = &evidence.ledger.sale;
    let id = sale.id.get();
    let Some(gate) = view else {
        // A gate evicts a sale some time after its end: nobody is admitted any more, and orders are read from the ledger.
        if sale.window.end > now {
            findings.add(
                FindingId::sale("no gate", sale.id).on_node(n),
                format!("sale {id}: the gate of {node} does not have it"),
            );
        }
        return;
    };
    if gate.marks > gate.cap {
        let text = format!("sale {id}: the gate of {node} has {} marks, its cap is {}", gate.marks, gate.cap);
        findings.add(FindingId::sale("over cap", sale.id).on_node(n), text);
    }
    if gate.cap != sale.total {
        let text = format!("sale {id}: the gate's cap is {} at {node}, the ledger's total is {}", gate.cap, sale.total);
        findings.add(FindingId::sale("gate cap", sale.id).on_node(n), text);
    }
    if gate.matches(&evidence.ledger) {
        return;
    }
    let Some(marks) = &gate.owners else {
        let text = format!(
            "sale {id}: the gate of {node} has {} marks, {} live rows or quarantined orders, not the same",
            gate.marks,
            owners.len()
        );
        return findings.add(FindingId::sale("marks", sale.id).on_node(n), text);
    };
    let held: HashSet<&(UserId, OrderId)> = marks.iter().collect();
    let expected: HashSet<&(UserId, OrderId)> = owners.iter().collect();
    let rows: HashSet<OrderId> = evidence.ledger.orders.iter().map(|row| row.order.id).collect();
    for (user, order) in marks.iter().filter(|mark| !expected.contains(mark)) {
        let text =
            format!("sale {id}: the gate of {node} has a mark of user {user} for order {order}, which is not live");
        let on_its_way = evidence.on_their_way(rules).filter(|_| !rows.contains(order));
        findings.add_without_row(FindingId::order("mark", sale.id, *order).on_node(n), text, on_its_way);
    }
    for (user, order) in owners.iter().filter(|owner| !held.contains(owner)) {
        let text = format!("sale {id}: the gate of {node} has no mark of the live order {order} of user {user}");
        let id = FindingId::order("no mark", sale.id, *order).on_node(n);
        if evidence.gates.len() > 1 { findings.add_at_rest(id, text) } else { findings.add(id, text) }
    }
}

pub(super) fn never_oversold(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    let apart = rules.max_clock_skew;
    let changes = &evidence.ledger.stock_changes;
    let added: i64 = changes.iter().map(|change| change.added).sum();
    // Events that return stock come before those that take it, earlier by the maximum clock skew. A reduction comes later by it.
    let mut steps: Vec<(Timestamp, i64)> = Vec::new();
    steps.extend(changes.iter().map(|change| match change.added {
        added @ 0.. => (change.asked_at.minus(apart), added),
        added => (change.done_at.plus(apart), added),
    }));
    let ends = ended_at(&evidence.ledger);
    for row in admitted(evidence) {
        let created_at = row.order.created_at;
        steps.push((created_at, -1));
        let Some(&end) = ends.get(&row.order.id) else { continue };
        // The routes do not tell when an order ended that was refunded later.
        let is_refunded = matches!(row.order.status, OrderStatus::Refunding | OrderStatus::Refunded);
        let end = if is_refunded && !evidence.from_database { created_at } else { end };
        steps.push((end.max(created_at).minus(apart).max(created_at), 1));
    }
    steps.sort_unstable_by_key(|&(at, step)| (at, std::cmp::Reverse(step)));
    let mut room = i64::from(sale.total) - added;
    for (at, step) in steps {
        room += step;
        if room < 0 {
            let id = sale.id.get();
            let text = format!("sale {id}: {} more sold than the stock at {at}", -room);
            return findings.add(FindingId::sale("prefix", sale.id), text);
        }
    }
}

pub(super) fn one_per_user(evidence: &Evidence, findings: &mut Findings) {
    let mut has: HashMap<UserId, OrderId> = HashMap::new();
    // Where nobody may buy again, an order that has ended counts as well.
    let counts = |row: &&OrderRow| !evidence.ledger.sale.buy_again && row.order.status != OrderStatus::Rejected;
    for row in evidence.ledger.orders.iter().filter(|row| row.live || counts(row)) {
        if let Some(other) = has.insert(row.order.user, row.order.id) {
            let (sale, user, id) = (evidence.ledger.sale.id, row.order.user, row.order.id);
            findings.add(FindingId::order("two", sale, id), format!("sale {sale}: user {user} has {other} and {id}"));
        }
    }
}

pub(super) fn ids_match_creation_time(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let mut seen = HashSet::new();
    for row in &evidence.ledger.orders {
        let (id, created_at) = (row.order.id, row.order.created_at);
        if !seen.insert(id) {
            findings.add(FindingId::order("twice", evidence.ledger.sale.id, id), format!("order {id} exists twice"));
        }
        let made_at = Origin::of(id.get(), created_at).at();
        if made_at > created_at.plus(rules.max_clock_skew) {
            findings.add(
                FindingId::order("future", evidence.ledger.sale.id, id),
                format!("order {id} was created at {created_at} and has an id of {made_at}"),
            );
        }
    }
}

pub(super) fn inside_window(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let settings = Settings::of(evidence, rules);
    for row in admitted(evidence) {
        let (id, at) = (row.order.id, row.order.created_at);
        if !settings.may_admit(at) {
            findings.add(
                FindingId::order("window", evidence.ledger.sale.id, id),
                format!("order {id} was admitted at {at}, outside the window"),
            );
        }
    }
}

/// With a single epoch there are no writes of an older one.
pub(super) fn one_epoch(sales: &[Evidence]) -> Option<String> {
    let one = sales.iter().all(|sale| sale.ledger.sale.epoch <= Epoch(1));
    one.then(|| "no sale has had a second epoch".to_owned())
}

pub(super) fn epochs_are_ordered(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in evidence.ledger.orders.iter().filter(|row| row.epoch > sale.epoch) {
        let (id, epoch) = (row.order.id, row.epoch.0);
        findings.add(
            FindingId::order("epoch", sale.id, id),
            format!("order {id} has the epoch {epoch}, its sale {}", sale.epoch.0),
        );
    }
    // An epoch is a fencing token: after an order of a later epoch there must be none of an earlier one.
    let mut rows: Vec<&OrderRow> = admitted(evidence).collect();
    rows.sort_unstable_by_key(|row| (row.order.created_at, row.epoch));
    let mut highest = None;
    for row in rows {
        if highest.is_some_and(|epoch| row.epoch < epoch) {
            let (id, epoch) = (row.order.id, row.epoch.0);
            let text = format!("order {id} was made under the epoch {epoch}, after a later one");
            findings.add(FindingId::order("older", sale.id, id), text);
        }
        highest = highest.max(Some(row.epoch));
    }
}

/// The pending releases whose orders are no longer live: the next start performs them.
fn releases_of_dead_orders(evidence: &Evidence) -> impl Iterator<Item = &OrderId> {
    let dead: HashSet<OrderId> =
        evidence.ledger.orders.iter().filter(|row| !row.live).map(|row| row.order.id).collect();
    evidence.ledger.pending_releases.iter().filter(move |order| dead.contains(order))
}

/// Pending releases can be read only from the database, and a stopped system performs them at its next start.
pub(super) fn releases_unknown(sales: &[Evidence]) -> Option<String> {
    if sales.iter().any(|sale| !sale.from_database) {
        return Some(super::NO_DATABASE.to_owned());
    }
    let stopped = sales.iter().filter(|sale| sale.gates.is_empty());
    let pending_releases: usize = stopped.map(|sale| releases_of_dead_orders(sale).count()).sum();
    (pending_releases > 0)
        .then(|| format!("the system is stopped: {pending_releases} releases wait for its next start"))
}

pub(super) fn nothing_is_pending(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = evidence.ledger.sale.id;
    for (n, gate) in evidence.gates.iter().enumerate().filter(|(_, gate)| rules.at_rest && gate.waiting > 0) {
        let text = format!("{} admitted orders wait for the ledger at {}", gate.waiting, gate.node);
        findings.add(FindingId::sale("waiting", sale).on_node(n), text);
    }
    let expected: HashSet<&OrderId> = match evidence.gates.is_empty() {
        true => releases_of_dead_orders(evidence).collect(),
        false => HashSet::new(),
    };
    for order in evidence.ledger.pending_releases.iter().filter(|order| !expected.contains(order)) {
        let text = format!("sale {sale}: the release of order {order} is pending");
        findings.add(FindingId::order("release", sale, *order), text);
    }
    for (user, order) in &evidence.ledger.quarantine {
        let text = format!("sale {sale}: order {order} of user {user} is in quarantine");
        findings.add(FindingId::order("quarantine", sale, *order), text);
    }
}

/// The reason why the backlog is not checkable: the tier has neither an outbox nor a queue, or requests are being processed.
pub(super) fn backlog_unknown(sales: &[Evidence], rules: Rules) -> Option<String> {
    if sales.iter().all(|sale| sale.backlog == Backlog::default()) {
        return Some("this tier has neither an outbox nor a queue, or they were not read".to_owned());
    }
    if sales.iter().any(|sale| sale.backlog.is_queue_unreadable) {
        return Some("the queue cannot be read".to_owned());
    }
    // The queue is the same for all sales.
    let queue = sales.iter().filter_map(|sale| sale.backlog.queue).max().unwrap_or(0);
    let outbox: u64 = sales.iter().filter_map(|sale| sale.backlog.outbox).sum();
    let is_empty = outbox == 0 && queue == 0;
    (!rules.at_rest && !is_empty)
        .then(|| format!("{outbox} orders in outboxes and {queue} messages in the queue are on their way"))
}

pub(super) fn backlog_is_empty(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = evidence.ledger.sale.id;
    let Backlog { outbox, queue, .. } = evidence.backlog;
    for (kind, of, depth) in [("outbox", "orders", outbox), ("queue", "messages", queue)] {
        if let Some(depth) = depth.filter(|depth| rules.at_rest && *depth > 0) {
            findings.add(FindingId::sale(kind, sale), format!("sale {sale}: the {kind} has {depth} {of}"));
        }
    }
}
