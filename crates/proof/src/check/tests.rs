//! For each invariant: a violation that the check must report, and valid cases that it must accept.

use std::time::Duration;

use stampede_core::ids::{IdKind, Snowflake, counter};
use stampede_core::ports::{OrderRow, SaleRecords, StockChange};
use stampede_core::{
    Clock as _, Epoch, Money, Order, OrderId, OrderStatus, Sale, SaleId, SalePhase, SaleStatus, SystemClock, Timestamp,
    UserId, VoucherId, Window, mark_digest,
};

use super::{Backlog, Evidence, GateView, Line, NodeGate, Rules, Verdict, check};
use crate::history::{Action, Attempt, Response};

/// The begin of the sale, in the past.
fn begin() -> Timestamp {
    SystemClock.now().minus(Duration::from_secs(600))
}

fn sale_id() -> SaleId {
    SaleId::new(7).unwrap()
}

fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

/// A sale with an order of each of the users 1 to `sold`, a second apart, and the matching history.
struct Case {
    evidence: Evidence,
    history: Vec<Attempt>,
    ids: IdKind,
}

impl Case {
    fn sold(total: u32, sold: i64) -> Self {
        Self::sold_by(IdKind::Snowflake, total, sold)
    }

    fn sold_by(ids: IdKind, total: u32, sold: i64) -> Self {
        let begin = begin();
        let sale = Sale {
            id: sale_id(),
            voucher: VoucherId::new(1).unwrap(),
            title: String::new(),
            price: Money::from_cents(100).unwrap(),
            worth: Money::from_cents(200).unwrap(),
            status: SaleStatus::OnSale,
            window: Window { begin, end: begin.plus(Duration::from_secs(3600)) },
            total,
            cap: total,
            sold: 0,
            epoch: Epoch(1),
            phase: SalePhase::Open,
            version: 1,
            released: 0,
        };
        let ledger = SaleRecords {
            sale,
            orders: Vec::new(),
            quarantine: Vec::new(),
            pending_releases: Vec::new(),
            stock_changes: Vec::new(),
        };
        let mut case = Self {
            evidence: Evidence { ledger, from_database: true, gates: Vec::new(), backlog: Backlog::default() },
            history: Vec::new(),
            ids,
        };
        for n in 1..=sold {
            case.buy(n, n);
        }
        case.gates(1);
        case
    }

    fn at(&self, second: i64) -> Timestamp {
        Timestamp::from_ms(self.evidence.ledger.sale.window.begin.ms() + second * 1000)
    }

    /// The id of the user's order, created at this second.
    fn order(&self, n: i64, second: i64) -> OrderId {
        let (at_ms, base_ms) = (self.at(second).ms(), Snowflake::made_at(0).ms());
        let id = match self.ids {
            // Milliseconds in the upper bits, the user in the lower.
            IdKind::Snowflake => ((at_ms - base_ms) << 22) + n,
            IdKind::Counter => counter::id((at_ms - base_ms) / 1000, u32::try_from(n).unwrap()),
        };
        OrderId::new(id).unwrap()
    }

    fn attempt(&mut self, n: i64, second: i64, response: Response, order: Option<OrderId>) {
        let start_us = super::history_us(self.at(second));
        let attempt = Attempt {
            action: Action::Buy,
            sale: sale_id(),
            user: user(n),
            start_us,
            end_us: start_us + 1000,
            response,
            order,
        };
        self.history.push(attempt);
    }

    fn buy(&mut self, n: i64, second: i64) -> OrderId {
        let (id, at) = (self.order(n, second), self.at(second));
        let price = self.evidence.ledger.sale.price;
        let order = Order {
            id,
            sale: sale_id(),
            user: user(n),
            status: OrderStatus::Unpaid,
            price,
            created_at: at,
            updated_at: at,
        };
        self.evidence.ledger.orders.push(OrderRow { order, live: true, epoch: Epoch(1), seq: n });
        self.evidence.ledger.sale.sold += 1;
        self.attempt(n, second, Response::Created, Some(id));
        id
    }

    /// The row of the user's only order stops being live at this second.
    fn end(&mut self, n: i64, second: i64) -> OrderId {
        let at = self.at(second);
        let row = self.evidence.ledger.orders.iter_mut().find(|row| row.order.user == user(n) && row.live).unwrap();
        row.order.status = OrderStatus::Cancelled;
        row.order.updated_at = at;
        row.live = false;
        self.evidence.ledger.sale.sold -= 1;
        row.order.id
    }

    fn cancel(&mut self, n: i64, second: i64) -> OrderId {
        let order = self.end(n, second);
        self.attempt(n, second, Response::Cancelled, Some(order));
        self.history.last_mut().unwrap().action = Action::Cancel;
        order
    }

    /// This many nodes whose gates match the ledger.
    fn gates(&mut self, count: usize) {
        let ledger = &self.evidence.ledger;
        let owners: Vec<_> =
            ledger.orders.iter().filter(|row| row.live).map(|row| (row.order.user, row.order.id)).collect();
        let view = GateView {
            cap: ledger.sale.total,
            marks: u32::try_from(owners.len()).unwrap(),
            digest: mark_digest(owners.iter().copied()),
            owners: Some(owners),
        };
        let gate =
            |n| NodeGate { node: format!("node {n}"), view: Some(view.clone()), waiting: 0, outbox: None, queue: None };
        self.evidence.gates = (0..count).map(gate).collect();
    }

    fn top_up(&mut self, second: i64, added: u32) {
        let at = self.at(second);
        let ledger = &mut self.evidence.ledger;
        ledger.stock_changes.push(StockChange { asked_at: at, done_at: at, added: added.into(), is_edit: true });
        ledger.sale.total += added;
        ledger.sale.cap = ledger.sale.total;
        ledger.sale.version += 1;
    }

    /// A reduction that was asked for at one second and completed at another.
    fn reduce(&mut self, asked: i64, done: i64, removed: u32) {
        let (asked_at, done_at) = (self.at(asked), self.at(done));
        let ledger = &mut self.evidence.ledger;
        ledger.stock_changes.push(StockChange { asked_at, done_at, added: -i64::from(removed), is_edit: true });
        ledger.sale.total -= removed;
        ledger.sale.cap = ledger.sale.total;
        ledger.sale.version += 1;
    }

    fn lines(&self) -> Vec<Line> {
        check(std::slice::from_ref(&self.evidence), Some(&self.history), Rules::default())
    }

    /// The findings, each with the number of its invariant.
    fn found(&self) -> Vec<(u8, String)> {
        let mut found = Vec::new();
        for line in self.lines() {
            if let Verdict::Failed { findings } = line.verdict {
                found.extend(findings.into_iter().map(|finding| (line.invariant, finding)));
            }
        }
        found
    }

    #[track_caller]
    fn holds(&self) {
        assert_eq!(self.found(), []);
    }

    #[track_caller]
    fn violates(&self, invariant: u8, text: &str) {
        let found = self.found();
        assert!(
            found.iter().any(|(n, finding)| *n == invariant && finding.contains(text)),
            "{invariant} {text}: {found:?}"
        );
    }
}

fn broken(change: impl FnOnce(&mut Case)) -> Case {
    let mut case = Case::sold(5, 4);
    case.holds();
    change(&mut case);
    case
}

#[test]
fn detects_counts_that_differ_from_the_rows() {
    broken(|case| case.evidence.ledger.sale.sold = 3).violates(1, "sold is 3, live rows are 4");
    broken(|case| case.evidence.ledger.sale.cap = 4).violates(1, "cap is 4, total is 5");
    let oversold = broken(|case| {
        for n in 5..=6 {
            case.buy(n, n);
        }
        case.gates(1);
    });
    oversold.violates(1, "6 live rows of 5");
    oversold.violates(2, "1 more sold than the stock");
}

#[test]
fn detects_a_gate_that_differs_from_the_rows() {
    let gate = |case: &mut Case, change: fn(&mut GateView)| change(case.evidence.gates[0].view.as_mut().unwrap());
    broken(|case| gate(case, |view| view.cap = 9)).violates(1, "the gate's cap is 9");
    broken(|case| case.evidence.gates[0].view = None).violates(1, "does not have it");
    let lacks = broken(|case| {
        gate(case, |view| {
            view.marks -= 1;
            view.owners.as_mut().unwrap().pop();
        });
    });
    lacks.violates(1, "no mark of the live order");
    let dead = broken(|case| _ = case.cancel(1, 50));
    dead.violates(1, "which is not live");
}

#[test]
fn ended_sale_needs_no_gate() {
    let mut case = Case::sold(5, 4);
    case.evidence.ledger.sale.window.end = case.at(300);
    case.evidence.gates[0].view = None;
    case.holds();
}

#[test]
fn gates_of_all_nodes_are_compared() {
    let mut case = Case::sold(5, 4);
    case.gates(3);
    case.holds();
    let view = case.evidence.gates[2].view.as_mut().unwrap();
    view.marks -= 1;
    view.owners.as_mut().unwrap().pop();
    case.violates(1, "the gate of node 2 has no mark");
    for gate in &mut case.evidence.gates {
        let view = gate.view.as_mut().unwrap();
        (view.marks, view.owners) = (0, Some(Vec::new()));
    }
    case.violates(1, "no gate has a mark");
}

#[test]
fn top_up_is_neither_reported_as_oversell_nor_hides_one() {
    let mut valid = Case::sold(2, 2);
    valid.top_up(20, 2);
    valid.buy(3, 21);
    valid.buy(4, 22);
    valid.attempt(5, 15, Response::SoldOut, None);
    valid.gates(1);
    valid.holds();

    let mut hidden = Case::sold(2, 3);
    hidden.top_up(20, 1);
    hidden.gates(1);
    hidden.violates(2, "1 more sold than the stock");

    let mut late = Case::sold(2, 2);
    late.top_up(20, 2);
    late.gates(1);
    late.attempt(5, 60, Response::SoldOut, None);
    late.violates(6, "got sold out when at most 2 of 4 were sold");
}

#[test]
fn reduction_is_neither_reported_as_oversell_nor_hides_one() {
    // More were sold before the reduction than there are after it.
    let mut valid = Case::sold(4, 4);
    valid.cancel(1, 10);
    valid.cancel(2, 11);
    valid.reduce(20, 25, 2);
    valid.attempt(5, 22, Response::SoldOut, None);
    valid.attempt(6, 60, Response::SoldOut, None);
    valid.gates(1);
    valid.holds();
    valid.attempt(7, 61, Response::Paused, None);
    valid.violates(6, "paused");

    let mut early = Case::sold(4, 2);
    early.reduce(20, 25, 2);
    early.gates(1);
    early.attempt(5, 15, Response::SoldOut, None);
    early.violates(6, "got sold out when at most 2 of 4 were sold");

    // An order above the reduced stock that has been cancelled since.
    let mut hidden = Case::sold(4, 2);
    hidden.reduce(20, 25, 2);
    hidden.buy(3, 40);
    hidden.cancel(3, 50);
    hidden.gates(1);
    hidden.violates(2, "1 more sold than the stock");
}

#[test]
fn detects_two_live_orders_of_a_user() {
    broken(|case| _ = case.buy(1, 9)).violates(3, "user 1 has");
}

#[test]
fn detects_a_confirmation_without_a_row() {
    broken(|case| _ = case.evidence.ledger.orders.pop()).violates(4, "lost: order");
    broken(|case| case.history[0].order = None).violates(4, "a confirmation without an order");
    broken(|case| case.history[0].response = Response::Wrong).violates(4, "an invalid response");
    broken(|case| case.evidence.ledger.orders[0].order.user = user(9)).violates(4, "belongs to 9");
    let rejected = broken(|case| {
        let row = &mut case.evidence.ledger.orders[0];
        (row.order.status, row.live) = (OrderStatus::Rejected, false);
    });
    rejected.violates(4, "was confirmed and is rejected");
}

#[test]
fn confirmed_order_stays_live_unless_its_buyer_cancels_it() {
    broken(|case| _ = case.end(1, 50)).violates(4, "without a request");
    let mut asked = Case::sold(5, 4);
    asked.cancel(1, 50);
    asked.gates(1);
    asked.holds();
    // The buyer may buy again after a cancellation.
    asked.buy(1, 60);
    asked.gates(1);
    asked.holds();
    let undone = broken(|case| {
        case.cancel(1, 50);
        let row = &mut case.evidence.ledger.orders[0];
        (row.order.status, row.live) = (OrderStatus::Unpaid, true);
        case.evidence.ledger.sale.sold += 1;
    });
    undone.violates(4, "was cancelled and is still live");
    let refused = broken(|case| {
        let order = case.history[0].order;
        case.attempt(1, 50, Response::IllegalStep, order);
        case.history.last_mut().unwrap().action = Action::Cancel;
    });
    refused.violates(4, "cannot be cancelled");
}

#[test]
fn detects_a_confirmation_of_a_cancelled_order() {
    let named = broken(|case| {
        let order = case.cancel(1, 50);
        case.gates(1);
        case.attempt(1, 60, Response::Already, Some(order));
    });
    named.violates(4, "after it had been cancelled");
}

#[test]
fn detects_a_refusal_of_a_user_with_an_order() {
    broken(|case| case.attempt(1, 50, Response::SoldOut, None)).violates(4, "was refused with sold_out");
}

#[test]
fn detects_attempts_at_a_sale_that_does_not_exist() {
    let case = Case::sold(5, 4);
    let lines = check(&[], Some(&case.history), Rules::default());
    let four = lines.iter().find(|line| line.invariant == 4).unwrap();
    assert!(four.to_string().contains("which the ledger does not have"), "{four}");
    // The refusal no_such_sale is correct.
    let refused: Vec<Attempt> =
        case.history.iter().map(|attempt| Attempt { response: Response::NoSuchSale, ..*attempt }).collect();
    assert!(!check(&[], Some(&refused), Rules::default()).iter().any(Line::failed));
}

#[test]
fn no_evidence_is_not_checkable() {
    assert!(!check(&[], None, Rules::default()).iter().any(Line::checked));
    assert!(!check(&[], Some(&[]), Rules::default()).iter().any(Line::checked));
}

#[test]
fn detects_a_row_without_an_attempt() {
    broken(|case| case.history[0].response = Response::SoldOut).violates(5, "unexpected: order");
    // An attempt without a response may have a row.
    let mut unanswered = Case::sold(5, 4);
    (unanswered.history[0].response, unanswered.history[0].order) = (Response::Unknown, None);
    unanswered.holds();
}

#[test]
fn detects_sold_out_while_there_is_stock() {
    broken(|case| case.attempt(9, 50, Response::SoldOut, None)).violates(6, "at most 4 of 5 were sold");
    let mut gone = Case::sold(4, 4);
    gone.attempt(9, 50, Response::SoldOut, None);
    gone.holds();
    // Stock that was returned long before must be for sale.
    gone.cancel(1, 60);
    gone.gates(1);
    gone.attempt(9, 61, Response::SoldOut, None);
    gone.holds();
    gone.attempt(9, 90, Response::SoldOut, None);
    gone.violates(6, "at most 3 of 4 were sold");
}

#[test]
fn stock_is_held_by_attempts_that_another_node_outran() {
    // User 8 held the last mark of a node when user 9 was refused there. The other node sold to user 4, and the ledger refused user 8.
    let outrun = |gates: usize, refused_at: i64| {
        let mut case = Case::sold(4, 3);
        case.attempt(8, 50, Response::SoldOut, None);
        case.history.last_mut().unwrap().end_us += 5_000_000;
        case.attempt(9, refused_at, Response::SoldOut, None);
        case.buy(4, 52);
        case.gates(gates);
        case
    };
    outrun(2, 51).holds();
    outrun(2, 45).violates(6, "user 9 got sold out when at most 3 of 4 were sold");
    outrun(1, 51).violates(6, "user 9 got sold out when at most 3 of 4 were sold");
}

#[test]
fn detects_incorrect_refusals() {
    for response in
        [Response::NotStarted, Response::Ended, Response::Paused, Response::NoSuchSale, Response::Unauthorized]
    {
        broken(|case| case.attempt(9, 50, response, None)).violates(6, response.as_str());
    }
    let mut paused = Case::sold(5, 4);
    paused.evidence.ledger.sale.version += 2;
    paused.attempt(9, 50, Response::Paused, None);
    paused.holds();
    let mut early = Case::sold(5, 4);
    early.attempt(9, -5, Response::NotStarted, None);
    early.holds();
    let mut ended = Case::sold(5, 4);
    ended.evidence.ledger.sale.status = SaleStatus::Ended;
    ended.attempt(9, 50, Response::Ended, None);
    ended.holds();
    // Refusals by a rate limit are reported as not checkable.
    let mut limited = Case::sold(5, 4);
    limited.attempt(9, 50, Response::TooManyRequests, None);
    limited.holds();
    let text = limited.lines().iter().map(ToString::to_string).collect::<String>();
    assert!(text.contains("1 responses with too_many_requests cannot be checked"), "{text}");
}

#[test]
fn detects_ids_that_repeat_decrease_or_are_in_the_future() {
    broken(|case| {
        let row = case.evidence.ledger.orders[0].clone();
        case.evidence.ledger.orders.push(row);
    })
    .violates(7, "exists twice");
    broken(|case| {
        let order = case.history[0].order;
        case.attempt(9, 50, Response::Created, order);
    })
    .violates(7, "was confirmed to user 1 and to user 9");
    broken(|case| {
        let order = case.order(9, 0);
        case.attempt(9, 50, Response::Created, Some(order));
    })
    .violates(7, "by the same worker");
    broken(|case| case.evidence.ledger.orders[0].order.created_at = case.at(-60)).violates(7, "has an id of");
}

#[test]
fn ids_of_a_counter_are_checked_by_their_time() {
    let case = || {
        let mut case = Case::sold_by(IdKind::Counter, 9, 4);
        case.buy(5, 40);
        case.gates(1);
        case.holds();
        case
    };
    // A node may use a second for a while, and one that uses another second is not ahead of it.
    let created = |made_s: i64| {
        let mut case = case();
        let order = case.order(6, made_s);
        case.attempt(6, 41, Response::Created, Some(order));
        case.found().into_iter().any(|(invariant, _)| invariant == 7)
    };
    assert!(!created(40) && !created(35));
    assert!(created(30));
    let mut future = case();
    future.evidence.ledger.orders[0].order.created_at = future.at(-60);
    future.violates(7, "has an id of");
    // After a change from snowflakes to a counter there are both.
    let mut both = Case::sold(9, 4);
    both.ids = IdKind::Counter;
    both.buy(5, 5);
    both.gates(1);
    both.holds();
}

#[test]
fn detects_an_order_outside_the_window() {
    broken(|case| case.evidence.ledger.sale.window.end = case.at(3)).violates(8, "outside the window");
}

#[test]
fn transitions_and_epochs_are_checked_only_if_there_are_any() {
    let case = Case::sold(5, 4);
    for invariant in [9, 10] {
        assert!(case.lines().iter().filter(|line| line.invariant == invariant).all(|line| !line.checked()));
    }
    broken(|case| case.evidence.ledger.orders[0].order.status = OrderStatus::Cancelled)
        .violates(9, "cancelled and live");
    broken(|case| case.evidence.ledger.orders[0].order.updated_at = case.at(-1)).violates(9, "before it was created");
    broken(|case| case.evidence.ledger.orders[0].order.price = Money::from_cents(1).unwrap())
        .violates(9, "the price 1");
    broken(|case| case.evidence.ledger.orders[0].epoch = Epoch(2)).violates(10, "has the epoch 2");
    let older = broken(|case| {
        case.evidence.ledger.sale.epoch = Epoch(2);
        case.evidence.ledger.orders[0].epoch = Epoch(2);
    });
    older.violates(10, "after a later one");
    let mut newer = Case::sold(5, 4);
    newer.evidence.ledger.sale.epoch = Epoch(2);
    newer.holds();
    assert!(newer.lines().iter().any(|line| line.invariant == 10 && line.checked()));
}

/// User 2 was admitted under the epoch 1 and quarantined, and is retried after users 4 and 5 have bought under the epoch 2.
#[test]
fn retried_order_is_no_write_under_an_older_epoch() {
    let retried = |epoch| {
        let mut case = Case::sold(9, 5);
        case.evidence.ledger.sale.epoch = Epoch(2);
        let rows = &mut case.evidence.ledger.orders;
        rows[3..].iter_mut().for_each(|row| row.epoch = Epoch(2));
        let mut row = rows.remove(1);
        row.epoch = epoch;
        rows.push(row);
        case
    };
    // A retry keeps the epoch of the admission.
    retried(Epoch(1)).holds();
    // With the current one, user 3 seems to have bought from a node that had missed the rebuild.
    retried(Epoch(2)).violates(10, "after a later one");
}

#[test]
fn detects_pending_work() {
    let release_pending = |case: &mut Case| {
        let order = case.cancel(1, 50);
        case.gates(1);
        case.evidence.ledger.pending_releases.push(order);
    };
    broken(release_pending).violates(11, "is pending");
    // A stopped system performs the release at its next start.
    let mut stopped = broken(release_pending);
    stopped.evidence.gates.clear();
    stopped.holds();
    assert!(stopped.lines().iter().any(|line| line.to_string().contains("1 releases wait for its next start")));
    let never = broken(|case| {
        let order = case.history[0].order.unwrap();
        case.evidence.ledger.pending_releases.push(order);
        case.evidence.gates.clear();
    });
    never.violates(11, "is pending");
    let quarantined = broken(|case| case.evidence.ledger.quarantine.push((user(9), case.order(9, 9))));
    quarantined.violates(11, "is in quarantine");
    // The administration routes return the quarantine, but not the pending releases.
    let mut from_routes = quarantined;
    from_routes.evidence.from_database = false;
    from_routes.violates(11, "is in quarantine");
    from_routes.evidence.ledger.quarantine.clear();
    assert!(from_routes.lines().iter().any(|line| line.invariant == 11 && !line.checked()));

    let mut waiting = Case::sold(5, 4);
    waiting.evidence.gates[0].waiting = 3;
    waiting.holds();
    let at_rest = Rules { at_rest: true, ..Rules::default() };
    let lines = check(std::slice::from_ref(&waiting.evidence), None, at_rest);
    assert!(lines.iter().any(|line| line.to_string().contains("3 admitted orders wait")), "{lines:?}");
}

#[test]
fn backlog_is_checked_where_the_tier_has_one() {
    let line = |case: &Case| {
        let at_rest = Rules { at_rest: true, ..Rules::default() };
        check(std::slice::from_ref(&case.evidence), None, at_rest).pop().unwrap()
    };
    let mut case = Case::sold(5, 4);
    assert!(!line(&case).checked());
    case.evidence.backlog.queue = Some(0);
    assert!(line(&case).checked() && !line(&case).failed());
    case.evidence.backlog = Backlog { outbox: Some(2), queue: Some(0) };
    assert!(line(&case).to_string().contains("the outbox has 2 orders"));
    case.evidence.backlog = Backlog { outbox: Some(0), queue: Some(3) };
    assert!(line(&case).to_string().contains("the queue has 3 messages"));
}
