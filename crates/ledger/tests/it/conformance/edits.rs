//! Edits of a sale's status and window: once per request id, and kept.

use std::time::Duration;

use stampede_core::ports::{EditOutcome, SaleEdit, SettingChange, Stores};
use stampede_core::{SaleId, SaleStatus, Timestamp, Window, WindowChange, WindowFault};

use super::{NOW, sale_of};

const MINUTE: Duration = Duration::from_secs(60);

/// The sales of this suite begin now and end in an hour.
fn window() -> Window {
    Window { begin: NOW, end: NOW.plus(60 * MINUTE) }
}

fn new_end(minutes: u32) -> WindowChange {
    WindowChange { begin: None, end: Some(NOW.plus(minutes * MINUTE)) }
}

async fn version(stores: &Stores, sale: SaleId) -> i64 {
    stores.ledger.sale(sale).await.unwrap().unwrap().version
}

async fn edits(stores: &Stores, sale: SaleId) -> Vec<SaleEdit> {
    stores.ledger.inspect(sale).await.unwrap().unwrap().edits
}

pub async fn status_is_edited_once_per_request_id(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    let set = |status, request| ledger.set_status(sale, status, request, NOW);
    let paused = set(SaleStatus::Paused, Some("a")).await.unwrap();
    assert!(
        matches!(paused, EditOutcome::Done { after, .. } if (after.status, after.version) == (SaleStatus::Paused, 2))
    );
    let resumed = set(SaleStatus::OnSale, None).await.unwrap();
    assert!(matches!(resumed, EditOutcome::Done { after, .. } if after.version == 3));
    // A late repetition of the pause.
    let late = set(SaleStatus::Paused, Some("a")).await.unwrap();
    assert!(matches!(late, EditOutcome::Repeated(sale) if (sale.status, sale.version) == (SaleStatus::OnSale, 3)));
    assert_eq!(set(SaleStatus::Ended, Some("a")).await.unwrap(), EditOutcome::RequestIdReused);
    // A request that finds everything as it asks for is known afterwards.
    assert!(matches!(set(SaleStatus::OnSale, Some("b")).await.unwrap(), EditOutcome::Repeated(_)));
    assert!(matches!(set(SaleStatus::Paused, Some("c")).await.unwrap(), EditOutcome::Done { .. }));
    let late = set(SaleStatus::OnSale, Some("b")).await.unwrap();
    assert!(matches!(late, EditOutcome::Repeated(sale) if (sale.status, sale.version) == (SaleStatus::Paused, 4)));
    // Without a request id it is noted only if it changes something.
    assert!(matches!(set(SaleStatus::Paused, None).await.unwrap(), EditOutcome::Repeated(_)));
    assert!(matches!(set(SaleStatus::OnSale, None).await.unwrap(), EditOutcome::Done { .. }));

    let (on, paused) = (SaleStatus::OnSale, SaleStatus::Paused);
    let status = |version, from, to| (version, SettingChange::Status { from, to });
    let expected =
        [status(2, on, paused), status(3, paused, on), status(3, on, on), status(4, on, paused), status(5, paused, on)];
    let mut found: Vec<_> = edits(stores, sale).await.iter().map(|edit| (edit.version, edit.change)).collect();
    found.sort_by_key(|(version, change)| (*version, !change.is_change()));
    assert_eq!(found, expected);
    assert_eq!(version(stores, sale).await, 5);
    // What was refused may be asked for again.
    let refused = set(SaleStatus::Draft, Some("d")).await.unwrap();
    assert_eq!(refused, EditOutcome::Illegal(on));
    assert!(matches!(set(paused, Some("d")).await.unwrap(), EditOutcome::Done { .. }));
}

pub async fn windows_are_edited_once_per_request_id(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    let set = |change, request, now| ledger.set_window(sale, change, request, now);
    let EditOutcome::Done { before, after } = set(new_end(90), "a", NOW).await.unwrap() else { panic!("not extended") };
    assert_eq!((before.window, before.version), (window(), 1));
    let extended = Window { end: NOW.plus(90 * MINUTE), ..window() };
    assert_eq!((after.window, after.version), (extended, 2));
    assert_eq!(ledger.sale(sale).await.unwrap().unwrap().window, extended);
    let shortened = Window { end: NOW.plus(30 * MINUTE), ..window() };
    let outcome = set(new_end(30), "b", NOW).await.unwrap();
    assert!(matches!(outcome, EditOutcome::Done { after, .. } if (after.window, after.version) == (shortened, 3)));
    // A late repetition, even when the sale is over.
    for now in [NOW, NOW.plus(120 * MINUTE)] {
        let late = set(new_end(90), "a", now).await.unwrap();
        assert!(matches!(late, EditOutcome::Repeated(sale) if (sale.window, sale.version) == (shortened, 3)));
    }
    assert_eq!(set(new_end(91), "a", NOW).await.unwrap(), EditOutcome::RequestIdReused);
    let with_begin = WindowChange { begin: Some(NOW), ..new_end(90) };
    assert_eq!(set(with_begin, "a", NOW).await.unwrap(), EditOutcome::RequestIdReused);
    // What changes nothing is known as well.
    assert!(matches!(set(new_end(30), "c", NOW).await.unwrap(), EditOutcome::Repeated(_)));
    assert!(matches!(set(new_end(40), "d", NOW).await.unwrap(), EditOutcome::Done { .. }));
    let late = set(new_end(30), "c", NOW).await.unwrap();
    assert!(matches!(late, EditOutcome::Repeated(sale) if sale.version == 4));

    let changes: Vec<_> = edits(stores, sale).await.into_iter().map(|edit| edit.change).collect();
    let last = Window { end: NOW.plus(40 * MINUTE), ..window() };
    for (from, to) in [(window(), extended), (extended, shortened), (shortened, shortened), (shortened, last)] {
        assert!(changes.contains(&SettingChange::Window { from, to }), "{from:?} to {to:?}: {changes:?}");
    }
    assert_eq!(changes.len(), 4);
    let nowhere = SaleId::new(404).unwrap();
    assert_eq!(ledger.set_window(nowhere, new_end(90), "e", NOW).await.unwrap(), EditOutcome::NoSuchSale);
}

pub async fn windows_are_edited_within_rules(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    let set = |change, request, now| ledger.set_window(sale, change, request, now);
    let refused = EditOutcome::IllegalWindow;
    let begin = |begin: Timestamp| WindowChange { begin: Some(begin), end: None };
    assert_eq!(set(begin(NOW.plus(MINUTE)), "a", NOW).await.unwrap(), refused(WindowFault::Begun));
    assert_eq!(set(new_end(1), "a", NOW.plus(MINUTE)).await.unwrap(), refused(WindowFault::EndIsPast));
    assert_eq!(set(new_end(90), "a", NOW.plus(60 * MINUTE)).await.unwrap(), refused(WindowFault::Ended));
    // Before the begin it can be moved, but not behind the end.
    let early = NOW.minus(10 * MINUTE);
    assert_eq!(set(begin(NOW.plus(60 * MINUTE)), "a", early).await.unwrap(), refused(WindowFault::Empty));
    let moved = WindowChange { begin: Some(NOW.minus(5 * MINUTE)), end: Some(NOW.plus(5 * MINUTE)) };
    let outcome = set(moved, "a", early).await.unwrap();
    let expected = Window { begin: NOW.minus(5 * MINUTE), end: NOW.plus(5 * MINUTE) };
    assert!(matches!(outcome, EditOutcome::Done { after, .. } if after.window == expected));
    assert_eq!(version(stores, sale).await, 2, "nothing that was refused has changed anything");
    ledger.set_status(sale, SaleStatus::Ended, None, NOW).await.unwrap();
    assert_eq!(set(new_end(90), "b", NOW).await.unwrap(), refused(WindowFault::Ended));
}

/// Edits of all kinds, and of all sales, have one list of request ids.
pub async fn edits_share_their_request_ids(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    let first = ledger.sale(sale).await.unwrap().unwrap();
    let mut voucher = stores.catalogue.voucher(first.voucher).await.unwrap().unwrap();
    voucher.id = stampede_core::VoucherId::new(8).unwrap();
    stores.catalogue.create_voucher(&voucher).await.unwrap();
    let other = SaleId::new(10).unwrap();
    ledger.create_sale(super::draft(other, voucher.id, 5), NOW).await.unwrap();

    assert!(matches!(ledger.top_up(sale, 1, "stock", NOW).await.unwrap(), EditOutcome::Done { .. }));
    let paused = ledger.set_status(sale, SaleStatus::Paused, Some("status"), NOW).await.unwrap();
    assert!(matches!(paused, EditOutcome::Done { .. }));
    let extended = ledger.set_window(sale, new_end(90), "window", NOW).await.unwrap();
    assert!(matches!(extended, EditOutcome::Done { .. }));
    let reused = EditOutcome::RequestIdReused;
    for of in [sale, other] {
        for id in ["status", "window"] {
            assert_eq!(ledger.top_up(of, 1, id, NOW).await.unwrap(), reused, "{of} {id}");
            assert_eq!(ledger.reduce(of, 1, id, NOW).await.unwrap(), reused, "{of} {id}");
        }
        for id in ["stock", "window"] {
            let set = ledger.set_status(of, SaleStatus::Paused, Some(id), NOW);
            assert_eq!(set.await.unwrap(), reused, "{of} {id}");
        }
        for id in ["stock", "status"] {
            assert_eq!(ledger.set_window(of, new_end(90), id, NOW).await.unwrap(), reused, "{of} {id}");
        }
    }
    let of_other = ledger.set_status(other, SaleStatus::Paused, Some("status"), NOW).await.unwrap();
    assert_eq!(of_other, reused, "the same edit of another sale");
    assert_eq!(ledger.set_window(other, new_end(90), "window", NOW).await.unwrap(), reused);
    assert_eq!((version(stores, sale).await, version(stores, other).await), (4, 1));
}

pub async fn edits_are_pending_until_the_gate_has_them(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 5).await;
    let pending = async || ledger.sales_with_pending_edits(10).await.unwrap();
    let applied = async || edits(stores, sale).await.iter().map(|edit| edit.applied_at).collect::<Vec<_>>();
    assert_eq!(pending().await, []);
    let at = |minutes: u32| NOW.plus(minutes * MINUTE);
    ledger.set_status(sale, SaleStatus::Paused, None, at(1)).await.unwrap();
    ledger.set_window(sale, new_end(90), "a", at(2)).await.unwrap();
    ledger.set_status(sale, SaleStatus::OnSale, Some("b"), at(3)).await.unwrap();
    assert_eq!((pending().await, applied().await), (vec![sale], vec![None; 3]));
    ledger.note_applied_edits(sale, 3, at(4)).await.unwrap();
    assert_eq!((pending().await, applied().await), (vec![sale], vec![Some(at(4)), Some(at(4)), None]));
    ledger.note_applied_edits(sale, 9, at(5)).await.unwrap();
    let all = [Some(at(4)), Some(at(4)), Some(at(5))];
    assert_eq!((pending().await, applied().await), (vec![], all.to_vec()), "the first time counts");
    let asked: Vec<_> = edits(stores, sale).await.iter().map(|edit| (edit.asked_at, edit.version)).collect();
    assert_eq!(asked, [(at(1), 2), (at(2), 3), (at(3), 4)]);
    // There is nothing to wait for if nothing changes.
    ledger.set_status(sale, SaleStatus::OnSale, Some("c"), at(6)).await.unwrap();
    assert_eq!(pending().await, []);
}
