//! What ledger and gates show by themselves.

use std::collections::{HashMap, HashSet};

use stampede_core::ids::Snowflake;
use stampede_core::ports::{OrderRow, SaleRecords};
use stampede_core::{Epoch, OrderId, OrderStatus, Timestamp, UserId, mark_digest};

use super::findings::Findings;
use super::{Evidence, GateView, NodeGate, Rules};

pub(super) const NO_STEPS: &str = "the ledger keeps the last state of an order, not its steps, and records no payments; no order is in an impossible state";

fn live(sale: &Evidence) -> impl Iterator<Item = &OrderRow> {
    sale.ledger.orders.iter().filter(|row| row.live)
}

fn admitted(sale: &Evidence) -> impl Iterator<Item = &OrderRow> {
    sale.ledger.orders.iter().filter(|row| row.order.status != OrderStatus::Rejected)
}

pub(super) fn ledger_adds_up(evidence: &Evidence, findings: &mut Findings) {
    let (sale, id) = (&evidence.ledger.sale, evidence.ledger.sale.id.get());
    let live = live(evidence).count();
    if sale.sold as usize != live {
        findings.add(("sold", 0, id), format!("sale {id}: sold is {}, live rows are {live}", sale.sold));
    }
    if live > sale.total as usize {
        findings.add(("oversold", 0, id), format!("sale {id}: {live} live rows of {}: oversold", sale.total));
    }
    if sale.cap != sale.total {
        findings.add(("cap", 0, id), format!("sale {id}: cap is {}, total is {}", sale.cap, sale.total));
    }
}

/// Every mark that a gate should hold: live orders, and those in quarantine that have no row.
fn owners(ledger: &SaleRecords) -> Vec<(UserId, OrderId)> {
    let rows: HashSet<OrderId> = ledger.orders.iter().map(|row| row.order.id).collect();
    let quarantined = ledger.quarantine.iter().filter(|(_, order)| !rows.contains(order));
    let live = ledger.orders.iter().filter(|row| row.live);
    live.map(|row| (row.order.user, row.order.id)).chain(quarantined.copied()).collect()
}

impl GateView {
    /// Does the gate hold exactly the marks that it should, as far as their digest tells?
    pub(crate) fn agrees_with(&self, ledger: &SaleRecords) -> bool {
        let owners = owners(ledger);
        self.marks as usize == owners.len() && self.digest == mark_digest(owners.into_iter())
    }
}

pub(super) fn gates_agree(evidence: &Evidence, now: Timestamp, findings: &mut Findings) {
    let owners = owners(&evidence.ledger);
    // With several nodes, the one that sold an order has its mark even if the others do not know of it yet.
    let listed: Vec<&Vec<(UserId, OrderId)>> =
        evidence.gates.iter().filter_map(|gate| gate.view.as_ref()?.owners.as_ref()).collect();
    if evidence.gates.len() > 1 && listed.len() == evidence.gates.len() {
        let held: HashSet<OrderId> = listed.into_iter().flatten().map(|(_, order)| *order).collect();
        for (user, order) in owners.iter().filter(|(_, order)| !held.contains(order)) {
            findings.add(("nowhere", 0, order.get()), format!("no gate has a mark of order {order} of user {user}"));
        }
    }
    for (n, gate) in evidence.gates.iter().enumerate() {
        gate_agrees(evidence, n, gate, &owners, now, findings);
    }
}

fn gate_agrees(
    evidence: &Evidence,
    n: usize,
    NodeGate { node, view, .. }: &NodeGate,
    owners: &[(UserId, OrderId)],
    now: Timestamp,
    findings: &mut Findings,
) {
    let sale = &evidence.ledger.sale;
    let id = sale.id.get();
    let Some(gate) = view else {
        // Long after its end a sale is dropped from memory: nobody is admitted any more, and orders come from the ledger.
        if sale.window.end > now {
            findings.add(("no gate", n, id), format!("sale {id}: the gate of {node} does not have it"));
        }
        return;
    };
    if gate.marks > gate.cap {
        let text = format!("sale {id}: the gate of {node} has {} marks, its cap is {}", gate.marks, gate.cap);
        findings.add(("over cap", n, id), text);
    }
    if gate.cap != sale.total {
        let text = format!("sale {id}: the gate's cap is {} at {node}, the ledger's total is {}", gate.cap, sale.total);
        findings.add(("gate cap", n, id), text);
    }
    if gate.agrees_with(&evidence.ledger) {
        return;
    }
    let Some(marks) = &gate.owners else {
        let text = format!(
            "sale {id}: the gate of {node} has {} marks, {} live rows or quarantined orders, not the same",
            gate.marks,
            owners.len()
        );
        return findings.add(("marks", n, id), text);
    };
    let held: HashSet<&(UserId, OrderId)> = marks.iter().collect();
    let rightful: HashSet<&(UserId, OrderId)> = owners.iter().collect();
    for (user, order) in marks.iter().filter(|mark| !rightful.contains(mark)) {
        let text =
            format!("sale {id}: the gate of {node} has a mark of user {user} for order {order}, which is not live");
        findings.add(("mark", n, order.get()), text);
    }
    for (user, order) in owners.iter().filter(|owner| !held.contains(owner)) {
        let text = format!("sale {id}: the gate of {node} has no mark of the live order {order} of user {user}");
        let key = ("no mark", n, order.get());
        if evidence.gates.len() > 1 { findings.add_at_rest(sale.id, key, text) } else { findings.add(key, text) }
    }
}

/// Top-ups are known from the database alone: where one may have been made, the total of an earlier moment is not known otherwise.
pub(super) fn top_ups_unknown(sales: &[Evidence]) -> Option<String> {
    let edited = sales.iter().any(|sale| !sale.from_database && sale.ledger.sale.ver > 1);
    edited.then(|| format!("a sale was edited, and {}", super::NO_DATABASE))
}

pub(super) fn no_prefix_oversells(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    let apart = rules.clocks_apart;
    let topped_up: i64 = evidence.ledger.top_ups.iter().map(|top_up| i64::from(top_up.added)).sum();
    // What makes room comes before what takes it, and as much earlier as clocks may be apart.
    let mut steps: Vec<(Timestamp, i64)> = Vec::new();
    steps.extend(evidence.ledger.top_ups.iter().map(|top_up| (top_up.at.minus(apart), i64::from(top_up.added))));
    for row in admitted(evidence) {
        steps.push((row.order.created_at, -1));
        if !row.live {
            steps.push((row.order.updated_at.max(row.order.created_at).minus(apart).max(row.order.created_at), 1));
        }
    }
    steps.sort_unstable_by_key(|&(at, step)| (at, std::cmp::Reverse(step)));
    let mut room = i64::from(sale.total) - topped_up;
    for (at, step) in steps {
        room += step;
        if room < 0 {
            let id = sale.id.get();
            let text = format!("sale {id}: {} more sold than there were at {at}", -room);
            return findings.add(("prefix", 0, id), text);
        }
    }
}

pub(super) fn one_per_user(evidence: &Evidence, findings: &mut Findings) {
    let mut has: HashMap<UserId, OrderId> = HashMap::new();
    for row in live(evidence) {
        if let Some(other) = has.insert(row.order.user, row.order.id) {
            let (sale, user, id) = (evidence.ledger.sale.id, row.order.user, row.order.id);
            findings.add(("two", 0, id.get()), format!("sale {sale}: user {user} has {other} and {id}"));
        }
    }
}

pub(super) fn ids_are_of_their_time(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let mut seen = HashSet::new();
    for row in &evidence.ledger.orders {
        let (id, created_at) = (row.order.id, row.order.created_at);
        if !seen.insert(id) {
            findings.add(("twice", 0, id.get()), format!("order {id} is there twice"));
        }
        let made_at = Snowflake::made_at(id.get());
        if made_at > created_at.plus(rules.clocks_apart) {
            findings.add(
                ("future", 0, id.get()),
                format!("order {id} was created at {created_at} and has an id of {made_at}"),
            );
        }
    }
}

pub(super) fn inside_the_window(evidence: &Evidence, findings: &mut Findings) {
    let window = evidence.ledger.sale.window;
    for row in admitted(evidence) {
        let (id, at) = (row.order.id, row.order.created_at);
        if at < window.begin || at >= window.end {
            findings.add(("window", 0, id.get()), format!("order {id} was admitted at {at}, outside the window"));
        }
    }
}

pub(super) fn legal_states(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in &evidence.ledger.orders {
        let (order, id) = (&row.order, row.order.id.get());
        if row.live != order.status.is_live() {
            let live = if row.live { "live" } else { "not live" };
            findings.add(("live", 0, id), format!("order {id} is {} and {live}", order.status.as_str()));
        }
        if order.updated_at < order.created_at {
            findings.add(("step", 0, id), format!("order {id} took its last step before it was created"));
        }
        if order.price != sale.price {
            let (price, of_sale) = (order.price.cents(), sale.price.cents());
            findings.add(("price", 0, id), format!("order {id} has the price {price}, its sale {of_sale}"));
        }
    }
}

/// With one epoch there is no older one whose writes could have been accepted.
pub(super) fn one_epoch(sales: &[Evidence]) -> Option<String> {
    let one = sales.iter().all(|sale| sale.ledger.sale.epoch <= Epoch(1));
    one.then(|| "no sale has had a second epoch, so there was no older write to refuse".to_owned())
}

pub(super) fn epochs_fence(evidence: &Evidence, findings: &mut Findings) {
    let sale = &evidence.ledger.sale;
    for row in evidence.ledger.orders.iter().filter(|row| row.epoch > sale.epoch) {
        let (id, epoch) = (row.order.id, row.epoch.0);
        findings.add(("epoch", 0, id.get()), format!("order {id} has the epoch {epoch}, its sale {}", sale.epoch.0));
    }
    // An epoch is a fencing token: once a later one has sold, an earlier one must not.
    let mut rows: Vec<&OrderRow> = admitted(evidence).collect();
    rows.sort_unstable_by_key(|row| (row.order.created_at, row.epoch));
    let mut highest = None;
    for row in rows {
        if highest.is_some_and(|epoch| row.epoch < epoch) {
            let (id, epoch) = (row.order.id, row.epoch.0);
            let text = format!("order {id} was made under the epoch {epoch}, after a later one");
            findings.add(("older", 0, id.get()), text);
        }
        highest = highest.max(Some(row.epoch));
    }
}

/// The releases owed whose orders are dead: the next start does them.
fn owed_for_dead(evidence: &Evidence) -> impl Iterator<Item = &OrderId> {
    let dead: HashSet<OrderId> =
        evidence.ledger.orders.iter().filter(|row| !row.live).map(|row| row.order.id).collect();
    evidence.ledger.pending_releases.iter().filter(move |order| dead.contains(order))
}

pub(super) fn owed_while_stopped(sales: &[Evidence]) -> Option<String> {
    let stopped = sales.iter().filter(|sale| sale.gates.is_empty());
    let pending_releases: usize = stopped.map(|sale| owed_for_dead(sale).count()).sum();
    (pending_releases > 0)
        .then(|| format!("the system is stopped: {pending_releases} releases wait for its next start"))
}

pub(super) fn nothing_left(evidence: &Evidence, rules: Rules, findings: &mut Findings) {
    let sale = evidence.ledger.sale.id;
    for (n, gate) in evidence.gates.iter().enumerate().filter(|(_, gate)| rules.at_rest && gate.waiting > 0) {
        let text = format!("{} admitted orders wait for the ledger at {}", gate.waiting, gate.node);
        findings.add(("waiting", n, 0), text);
    }
    let lawful: HashSet<&OrderId> = match evidence.gates.is_empty() {
        true => owed_for_dead(evidence).collect(),
        false => HashSet::new(),
    };
    for order in evidence.ledger.pending_releases.iter().filter(|order| !lawful.contains(order)) {
        let text = format!("sale {sale}: the release of order {order} is pending_releases to the gate");
        findings.add(("pending_releases", 0, order.get()), text);
    }
    for (user, order) in &evidence.ledger.quarantine {
        let text = format!("sale {sale}: order {order} of user {user} is in quarantine");
        findings.add(("quarantine", 0, order.get()), text);
    }
}
