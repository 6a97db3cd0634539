//! Edits of the status and the window.

use super::*;

/// A sale of a minute that is shortened at second 20, which the gate has at second 22, to end at second 30.
fn shortened(applied: Option<i64>) -> Case {
    let mut case = Case::sold(9, 4);
    case.evidence.ledger.sale.window.end = case.at(60);
    case.set_end(20, applied, 30);
    case.gates(1);
    case
}

#[test]
fn window_of_the_time_counts_for_admissions() {
    let bought = |mut case: Case, second: i64| {
        case.buy(8, second);
        case.gates(1);
        case
    };
    bought(shortened(Some(22)), 29).holds();
    bought(shortened(Some(22)), 30).violates(8, "outside the window");
    // While the gate may not have the edit, the old window counts.
    bought(shortened(Some(40)), 35).holds();
    bought(shortened(Some(40)), 42).violates(8, "outside the window");
    bought(shortened(None), 59).holds();
    bought(shortened(None), 60).violates(8, "outside the window");
    // Gates of other nodes follow within seconds.
    let mut two_gates = bought(shortened(Some(40)), 42);
    two_gates.gates(2);
    two_gates.holds();
    let mut late = bought(shortened(Some(40)), 47);
    late.gates(2);
    late.violates(8, "outside the window");

    let extended = |asked: i64| {
        let mut case = Case::sold(9, 4);
        case.evidence.ledger.sale.window.end = case.at(30);
        case.set_end(asked, Some(asked), 60);
        case.gates(1);
        case
    };
    bought(extended(20), 45).holds();
    bought(extended(20), 60).violates(8, "outside the window");
    // Nobody could know of the edit then.
    bought(extended(50), 45).violates(8, "outside the window");
}

#[test]
fn begin_that_is_moved_counts_from_the_request() {
    // From second 100 to second 0, at second 30.
    let case = |bought: i64, refused: i64| {
        let mut case = Case::sold(9, 0);
        let to = case.evidence.ledger.sale.window;
        let from = Window { begin: case.at(100), ..to };
        let (asked_at, applied_at) = (case.at(30), Some(case.at(32)));
        let ledger = &mut case.evidence.ledger;
        ledger.sale.version = 2;
        ledger.edits.push(SaleEdit { asked_at, applied_at, version: 2, change: SettingChange::Window { from, to } });
        case.buy(1, bought);
        case.attempt(9, refused, Response::NotStarted, None);
        case.gates(1);
        case
    };
    case(30, 20).holds();
    case(31, 36).holds();
    case(20, 20).violates(8, "outside the window");
    case(50, 50).violates(6, "user 9 was refused with not_started incorrectly");
}

#[test]
fn refusals_are_judged_by_the_settings_of_their_time() {
    let refused = |mut case: Case, second: i64, response: Response| {
        case.attempt(9, second, response, None);
        case
    };
    refused(shortened(Some(22)), 31, Response::Ended).holds();
    refused(shortened(Some(22)), 25, Response::Ended).violates(6, "ended");
    // The request came after the new end.
    let late = || {
        let mut case = shortened(Some(22));
        let edit = &mut case.evidence.ledger.edits[0];
        edit.asked_at = edit.asked_at.plus(Duration::from_secs(20));
        edit.applied_at = Some(edit.asked_at);
        case
    };
    refused(late(), 35, Response::Ended).violates(6, "ended");
    refused(late(), 41, Response::Ended).holds();

    let paused = |asked: i64, resumed: i64| {
        let mut case = Case::sold(9, 4);
        case.set_status(asked, asked + 1, SaleStatus::Paused);
        case.set_status(resumed, resumed + 1, SaleStatus::OnSale);
        case
    };
    refused(paused(20, 30), 25, Response::Paused).holds();
    refused(paused(20, 30), 33, Response::Paused).holds();
    refused(paused(20, 30), 10, Response::Paused).violates(6, "paused");
    refused(paused(20, 30), 50, Response::Paused).violates(6, "paused");
    // A version that no edit explains: the sale may have been paused at any time.
    let mut older = refused(paused(20, 30), 50, Response::Paused);
    older.evidence.ledger.sale.version += 1;
    older.holds();

    let mut ended = Case::sold(9, 4);
    ended.set_status(20, 21, SaleStatus::Ended);
    refused(ended, 20, Response::Ended).holds();
    let mut ended = Case::sold(9, 4);
    ended.set_status(20, 21, SaleStatus::Ended);
    refused(ended, 15, Response::Ended).violates(6, "ended");

    let published = || {
        let mut case = Case::sold(9, 0);
        case.evidence.ledger.sale.status = SaleStatus::Draft;
        case.set_status(20, 21, SaleStatus::OnSale);
        case
    };
    refused(published(), 10, Response::NoSuchSale).holds();
    refused(published(), 40, Response::NoSuchSale).violates(6, "no_such_sale");
}

/// The administration routes do not return edits.
#[test]
fn window_of_an_edited_sale_is_checked_with_the_database_alone() {
    let window = |case: &Case| case.lines().into_iter().find(|line| line.invariant == 8).unwrap();
    let mut case = shortened(Some(22));
    case.buy(8, 45);
    assert!(window(&case).failed());
    case.evidence.from_database = false;
    case.evidence.ledger.edits.clear();
    assert!(!window(&case).failed() && !window(&case).checked());
    let mut never_edited = Case::sold(9, 4);
    never_edited.evidence.from_database = false;
    assert!(window(&never_edited).checked());
}
