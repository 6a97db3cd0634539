//! The conformance suite of the ledger. `suite!` generates one test per case, each on a new database of the first expression; those of the
//! outbox of events on one of the second.

use std::collections::HashSet;
use std::time::Duration;

use stampede_core::ids::{IdKind, WorkerId};
use stampede_core::ports::Stores;
use stampede_core::ports::{Admitted, CreateOutcome, EditOutcome, RecordOutcome, SaleDraft, TransitionOutcome};
use stampede_core::*;

macro_rules! suite {
    ($fresh:expr, with_events: $with_events:expr) => {
        $crate::conformance::suite!(@each $fresh;
            no_events_are_written_unless_configured, records_once, never_sells_more_than_total, one_live_order_per_user, rejects_another_epoch, reports_an_id_collision,
            cancels_once, steps_of_orders_are_kept, unpaid_orders_expire_once_they_are_due, late_recording_leaves_the_whole_time_to_pay, concurrent_expiry_returns_stock_once, sales_can_be_left_out_of_expiry, orders_that_fall_due_together_expire_within_seconds, sales_without_a_deadline_never_expire, orders_are_paid_once, payments_that_cannot_pay_are_returned, late_payment_is_returned_and_revives_nothing, late_payments_are_moved_to_new_orders, payments_are_moved_only_to_orders_that_they_fit, held_payments_that_are_not_moved_are_returned, moving_and_returning_have_one_winner, payment_cancellation_and_expiry_have_one_winner, paid_orders_are_refunded_once, refunds_do_not_wait_for_a_clock_that_is_ahead, codes_are_tried_a_few_times, refund_and_redemption_have_one_winner, cancelled_order_stays_cancelled, nobody_buys_again_where_that_is_forbidden, concurrent_batches_neither_oversell_nor_duplicate, edits_are_versioned, status_is_edited_once_per_request_id, windows_are_edited_once_per_request_id, windows_are_edited_within_rules, edits_share_their_request_ids, edits_are_pending_until_the_gate_has_them, tops_up_once,
            reduces_once_and_in_two_steps,
            creates_only_under_a_parent, leases_never_overlap, snowflakes_do_not_follow_ids_of_a_counter, one_rebuild_wins_and_opens_every_sale,
            a_new_sale_is_opened_under_the_incarnation_of_a_rebuild, tiers_exclude_each_other, processes_agree_on_the_queue, parked_messages_are_kept_until_they_are_deleted, challenge_has_limited_attempts_and_is_used_once,
            challenges_of_a_phone_are_bounded, sessions_are_extended_and_ended, disabled_account_has_no_session,
            quarantined_orders_keep_their_mark_until_an_operator_acts,
            quarantine_yields_to_rows_epochs_and_stock, order_stays_in_quarantine_after_a_rebuild, quarantined_order_can_be_cancelled, retried_order_keeps_the_epoch_of_its_admission, cancellation_is_never_older_than_its_order,
            orders_of_old_sales_are_listed_from_the_index, orders_are_listed_newest_first, missing_sale_is_poison, audit_log_is_append_only, shops_are_searched_and_edited,
            search_reads_a_bounded_number_of_shops,
            lower_fencing_tokens_are_refused, ids_are_read_in_pages,
            reconcile_log_is_read_in_pages, cap_of_the_gate_is_adopted_once, alerts_are_claimed_once);
        $crate::conformance::suite!(@each $with_events;
            steps_of_moved_payments_are_written_into_the_outbox, every_step_is_written_into_the_outbox, outbox_keeps_what_is_not_delivered, rejected_events_are_set_aside_until_they_are_retried);
    };
    (@each $fresh:expr; $($case:ident),*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $case() {
            let fresh = $fresh;
            $crate::conformance::$case(&fresh.stores).await;
        })*
    };
}
pub(crate) use suite;

mod accounts;
mod buy_again;
mod edits;
mod event_outbox;
mod events;
mod expiry;
mod fence;
mod gate;
mod late_payments;
mod own_orders;
mod payments;
mod quarantine;
mod reconcile;
mod shops;
pub use accounts::*;
pub use buy_again::*;
pub use edits::*;
pub use event_outbox::*;
pub use events::*;
pub use expiry::*;
pub use fence::*;
pub use gate::*;
pub use late_payments::*;
pub use own_orders::*;
pub use payments::*;
pub use quarantine::*;
pub use reconcile::*;
pub use shops::*;

const NOW: Timestamp = Timestamp::from_ms(1_800_000_000_000);
const E1: Epoch = Epoch(1);

fn order(n: i64) -> OrderId {
    OrderId::new(n).unwrap()
}

fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

fn admitted(o: i64, u: i64) -> Admitted {
    Admitted { order: order(o), user: user(u), seq: o, at: NOW }
}

fn batch(pairs: &[(i64, i64)]) -> Vec<Admitted> {
    pairs.iter().map(|&(o, u)| admitted(o, u)).collect()
}

fn refused(reason: RejectReason, existing: Option<i64>) -> RecordOutcome {
    RecordOutcome::Rejected { reason, existing: existing.map(order) }
}

pub async fn sale_of(stores: &Stores, stock: u32) -> SaleId {
    sale_with_deadline(stores, stock, 0).await
}

pub async fn sale_with_deadline(stores: &Stores, stock: u32, payment_deadline_ms: u32) -> SaleId {
    sale_with(stores, |draft| SaleDraft { stock, payment_deadline_ms, ..draft }).await
}

/// Creates a sale with what `edit` changes.
pub async fn sale_with(stores: &Stores, edit: impl FnOnce(SaleDraft) -> SaleDraft) -> SaleId {
    let shop = Shop {
        id: ShopId::new(1).unwrap(),
        type_id: ShopTypeId::new(1).unwrap(),
        name: "茶".into(),
        address: "1 Lane".into(),
    };
    stores.catalogue.create_shop(&shop).await.unwrap();
    let voucher = Voucher {
        id: VoucherId::new(7).unwrap(),
        shop: shop.id,
        kind: VoucherKind::FlashSale,
        title: "Tea for two".into(),
        subtitle: String::new(),
        rules: String::new(),
        price: Money::from_cents(100).unwrap(),
        worth: Money::from_cents(900).unwrap(),
        on_shelf: true,
    };
    assert_eq!(stores.catalogue.create_voucher(&voucher).await.unwrap(), CreateOutcome::Created);
    assert_eq!(stores.catalogue.voucher(voucher.id).await.unwrap().as_ref(), Some(&voucher));
    let sale = SaleId::new(9).unwrap();
    let draft = edit(draft(sale, voucher.id, 1));
    assert_eq!(stores.ledger.create_sale(draft, NOW).await.unwrap(), CreateOutcome::Created);
    sale
}

fn draft(id: SaleId, voucher: VoucherId, stock: u32) -> SaleDraft {
    let window = Window { begin: NOW, end: NOW.plus(Duration::from_secs(3600)) };
    SaleDraft { id, voucher, stock, window, status: SaleStatus::OnSale, payment_deadline_ms: 0, buy_again: true }
}

pub async fn record(stores: &Stores, sale: SaleId, pairs: &[(i64, i64)]) -> Vec<RecordOutcome> {
    stores.ledger.record(sale, E1, &batch(pairs)).await.unwrap()
}

/// Checks that sold = live rows ≤ total, with one live order per user.
pub async fn check(stores: &Stores, sale: SaleId) -> usize {
    let loaded = stores.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!(loaded.marks.len(), loaded.sale.sold as usize);
    assert!(loaded.sale.sold <= loaded.sale.total);
    assert_eq!(loaded.marks.iter().map(|mark| mark.0).collect::<HashSet<_>>().len(), loaded.marks.len());
    loaded.marks.len()
}

pub async fn records_once(stores: &Stores) {
    let sale = sale_of(stores, 10).await;
    assert_eq!(record(stores, sale, &[]).await, []);
    assert_eq!(record(stores, sale, &[(1, 1), (2, 2)]).await, [RecordOutcome::Inserted; 2]);
    assert_eq!(
        record(stores, sale, &[(2, 2), (3, 3), (1, 1)]).await,
        [RecordOutcome::AlreadyRecorded, RecordOutcome::Inserted, RecordOutcome::AlreadyRecorded]
    );
    assert_eq!(check(stores, sale).await, 3);
    let row = stores.ledger.order(order(1)).await.unwrap().unwrap();
    assert_eq!((row.sale, row.user, row.status, row.price.cents()), (sale, user(1), OrderStatus::Unpaid, 100));
    assert_eq!((row.created_at, row.updated_at), (NOW, NOW));
    assert_eq!(stores.ledger.live_order(sale, user(1)).await.unwrap(), Some(row));
}

pub async fn never_sells_more_than_total(stores: &Stores) {
    let sale = sale_of(stores, 2).await;
    // The order of admission is given by seq, not by the position in the batch.
    let late_first = [(3, 3), (1, 1), (2, 2)];
    let answers = record(stores, sale, &late_first).await;
    let sold_out = refused(RejectReason::SoldOut, None);
    assert_eq!(answers, [sold_out, RecordOutcome::Inserted, RecordOutcome::Inserted]);
    assert_eq!(check(stores, sale).await, 2);
    let row = stores.ledger.order(order(3)).await.unwrap().unwrap();
    assert_eq!(row.status, OrderStatus::Rejected, "a refused id ends as a row");
    assert_eq!(record(stores, sale, &[(3, 3)]).await, [RecordOutcome::Dead]);
}

pub async fn one_live_order_per_user(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    assert_eq!(
        record(stores, sale, &[(1, 1), (2, 1)]).await,
        [RecordOutcome::Inserted, refused(RejectReason::AlreadyHas, Some(1))]
    );
    assert_eq!(record(stores, sale, &[(3, 1)]).await, [refused(RejectReason::AlreadyHas, Some(1))]);
    assert_eq!(check(stores, sale).await, 1);
}

pub async fn rejects_another_epoch(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    let answers = stores.ledger.record(sale, Epoch(2), &batch(&[(1, 1)])).await.unwrap();
    assert_eq!(answers, [refused(RejectReason::Epoch, None)]);
    assert_eq!(check(stores, sale).await, 0);
}

pub async fn reports_an_id_collision(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    record(stores, sale, &[(1, 1)]).await;
    assert_eq!(record(stores, sale, &[(1, 2), (2, 2)]).await, [RecordOutcome::IdCollision, RecordOutcome::Inserted]);
    assert_eq!(stores.ledger.order(order(1)).await.unwrap().unwrap().user, user(1));
    assert_eq!(check(stores, sale).await, 2);
}

pub async fn cancels_once(stores: &Stores) {
    let sale = sale_of(stores, 1).await;
    record(stores, sale, &[(1, 1)]).await;
    let later = NOW.plus(Duration::from_secs(1));
    let cancel = |who| stores.ledger.cancel(order(1), user(who), later);
    assert_eq!(cancel(2).await.unwrap(), TransitionOutcome::NoSuchOrder, "another's order is as good as none");
    let TransitionOutcome::Done(cancelled) = cancel(1).await.unwrap() else { panic!("not cancelled") };
    assert_eq!((cancelled.status, cancelled.updated_at), (OrderStatus::Cancelled, later));
    assert_eq!(stores.ledger.order(order(1)).await.unwrap(), Some(cancelled.clone()));
    assert_eq!(cancel(1).await.unwrap(), TransitionOutcome::Repeated(cancelled));
    assert_eq!(stores.ledger.sale(sale).await.unwrap().unwrap().released, 1, "counted once");
    assert_eq!(check(stores, sale).await, 0);
    assert_eq!(stores.ledger.live_order(sale, user(1)).await.unwrap(), None);

    let pending_releases = stores.ledger.pending_releases(None, 10).await.unwrap();
    assert_eq!(
        pending_releases.iter().map(|o| (o.order, o.sale, o.user)).collect::<Vec<_>>(),
        [(order(1), sale, user(1))]
    );
    stores.ledger.delete_pending_releases(&[order(1)]).await.unwrap();
    assert_eq!(stores.ledger.pending_releases(None, 10).await.unwrap(), []);
}

pub async fn cancelled_order_stays_cancelled(stores: &Stores) {
    let sale = sale_of(stores, 2).await;
    record(stores, sale, &[(1, 1)]).await;
    stores.ledger.cancel(order(1), user(1), NOW).await.unwrap();
    assert_eq!(record(stores, sale, &[(1, 1)]).await, [RecordOutcome::Dead], "a late duplicate revives nothing");
    assert_eq!(record(stores, sale, &[(2, 1)]).await, [RecordOutcome::Inserted], "a new try may succeed");
    assert_eq!(check(stores, sale).await, 1);
}

/// Eight writers with the same users in different batches, with repetitions, and more users than stock.
pub async fn concurrent_batches_neither_oversell_nor_duplicate(stores: &Stores) {
    let sale = sale_of(stores, 60).await;
    let writers = (0..8i64).map(|writer| {
        let stores = stores.clone();
        tokio::spawn(async move {
            let mut recorded = Vec::new();
            for round in 0..10i64 {
                let pairs: Vec<(i64, i64)> = (0..16)
                    .map(|i| (1 + writer * 1000 + round * 20 + i, 1 + (writer * 7 + round * 13 + i * 3) % 100))
                    .collect();
                for _again in 0..2 {
                    let answers = record(&stores, sale, &pairs).await;
                    recorded.extend(
                        pairs.iter().zip(answers).filter(|(_, a)| *a == RecordOutcome::Inserted).map(|(p, _)| *p),
                    );
                }
            }
            recorded
        })
    });
    let mut sold = HashSet::new();
    for writer in writers.collect::<Vec<_>>() {
        for (o, u) in writer.await.unwrap() {
            assert!(sold.insert((user(u), order(o))), "recorded once");
        }
    }
    assert_eq!(sold.len(), 60);
    assert_eq!(check(stores, sale).await, 60);
    let loaded = stores.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!(loaded.marks.into_iter().collect::<HashSet<_>>(), sold);
}

pub async fn edits_are_versioned(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    let set = |status| stores.ledger.set_status(sale, status, None, NOW);
    let EditOutcome::Done { before, after: paused } = set(SaleStatus::Paused).await.unwrap() else {
        panic!("not paused")
    };
    assert_eq!((paused.status, paused.version), (SaleStatus::Paused, 2));
    assert_eq!((before.status, before.version), (SaleStatus::OnSale, 1));
    assert!(matches!(set(SaleStatus::Paused).await.unwrap(), EditOutcome::Repeated(sale) if sale.version == 2));
    assert_eq!(set(SaleStatus::Draft).await.unwrap(), EditOutcome::Illegal(SaleStatus::Paused));
    assert!(matches!(set(SaleStatus::Ended).await.unwrap(), EditOutcome::Done { .. }));
    assert_eq!(set(SaleStatus::OnSale).await.unwrap(), EditOutcome::Illegal(SaleStatus::Ended));
    let nowhere = SaleId::new(404).unwrap();
    assert_eq!(stores.ledger.set_status(nowhere, SaleStatus::Ended, None, NOW).await.unwrap(), EditOutcome::NoSuchSale);
    assert_eq!(stores.ledger.sale(sale).await.unwrap().unwrap().version, 3);
}

pub async fn tops_up_once(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    let top_up = |add, request| stores.ledger.top_up(sale, add, request, NOW);
    let EditOutcome::Done { before, after: more } = top_up(3, "a").await.unwrap() else { panic!("not topped up") };
    assert_eq!((more.total, more.cap, more.version), (8, 8, 2));
    assert_eq!((before.total, before.version), (5, 1));
    assert!(matches!(top_up(3, "a").await.unwrap(), EditOutcome::Repeated(sale) if sale.total == 8));
    assert_eq!(top_up(4, "a").await.unwrap(), EditOutcome::RequestIdReused);
    assert!(matches!(top_up(4, "b").await.unwrap(), EditOutcome::Done { after, .. } if after.total == 12));
    assert_eq!(stores.ledger.sale(sale).await.unwrap().unwrap().total, 12);
    let too_much = top_up(shop::MAX_STOCK, "c").await.unwrap();
    assert_eq!(too_much, EditOutcome::Illegal(SaleStatus::OnSale));
}

pub async fn reduces_once_and_in_two_steps(stores: &Stores) {
    let ledger = &stores.ledger;
    let sale = sale_of(stores, 10).await;
    record(stores, sale, &[(1, 1), (2, 2), (3, 3)]).await;
    let reduce = |remove, request| ledger.reduce(sale, remove, request, NOW);
    let state = async || {
        let sale = ledger.sale(sale).await.unwrap().unwrap();
        (sale.cap, sale.total, sale.version)
    };
    let EditOutcome::Done { before, after } = reduce(4, "a").await.unwrap() else { panic!("not reduced") };
    assert_eq!((before.cap, before.total, before.version), (10, 10, 1));
    assert_eq!((after.cap, after.total, after.version), (6, 10, 2), "the total stays until the gate has taken the cap");
    assert_eq!(state().await, (6, 10, 2));
    assert!(matches!(reduce(4, "a").await.unwrap(), EditOutcome::Repeated(sale) if sale.cap == 6));
    assert_eq!(reduce(3, "a").await.unwrap(), EditOutcome::RequestIdReused);
    assert_eq!(ledger.top_up(sale, 4, "a", NOW).await.unwrap(), EditOutcome::RequestIdReused);
    assert_eq!(reduce(7, "b").await.unwrap(), EditOutcome::Illegal(SaleStatus::OnSale), "there are six");
    // Edits come between the steps. The reduction is not forgotten.
    assert!(matches!(ledger.top_up(sale, 2, "c", NOW).await.unwrap(), EditOutcome::Done { .. }));
    assert_eq!(state().await, (8, 12, 3));
    assert!(matches!(reduce(7, "d").await.unwrap(), EditOutcome::Done { .. }));
    assert_eq!(state().await, (1, 12, 4));
    assert_eq!(ledger.adopt_cap(sale, 3, 8, NOW).await.unwrap(), None, "an older version");
    let later = NOW.plus(Duration::from_secs(60));
    // The gate has five marks.
    assert_eq!(ledger.adopt_cap(sale, 4, 5, later).await.unwrap(), Some(5));
    assert_eq!(state().await, (5, 5, 4));
    assert!(matches!(reduce(4, "a").await.unwrap(), EditOutcome::Repeated(_)), "still known when it is completed");
    assert_eq!(ledger.top_up(sale, 7, "d", NOW).await.unwrap(), EditOutcome::RequestIdReused);

    let mut changes = ledger.inspect(sale).await.unwrap().unwrap().stock_changes;
    changes.sort_by_key(|change| change.added);
    let found: Vec<_> = changes.iter().map(|change| (change.asked_at, change.done_at, change.added)).collect();
    assert_eq!(found, [(NOW, later, -7), (NOW, later, 0), (NOW, NOW, 2)], "10 + 2 - 7 = 5");
    assert!(changes.iter().all(|change| change.is_edit));
    ledger.set_status(sale, SaleStatus::Ended, None, NOW).await.unwrap();
    assert_eq!(reduce(1, "e").await.unwrap(), EditOutcome::Illegal(SaleStatus::Ended));
    assert_eq!(ledger.reduce(SaleId::new(404).unwrap(), 1, "f", NOW).await.unwrap(), EditOutcome::NoSuchSale);
}

pub async fn creates_only_under_a_parent(stores: &Stores) {
    let sale = sale_of(stores, 5).await;
    let held = stores.ledger.sale(sale).await.unwrap().unwrap();
    let other = SaleId::new(10).unwrap();
    let create = |voucher| stores.ledger.create_sale(draft(other, voucher, 1), NOW);
    assert_eq!(create(held.voucher).await.unwrap(), CreateOutcome::AlreadyExists, "one sale a voucher");
    assert_eq!(create(VoucherId::new(404).unwrap()).await.unwrap(), CreateOutcome::ParentMissing);
    let mut shop = stores.catalogue.shop(ShopId::new(1).unwrap()).await.unwrap().unwrap();
    shop.id = ShopId::new(2).unwrap();
    shop.type_id = ShopTypeId::new(404).unwrap();
    assert_eq!(stores.catalogue.create_shop(&shop).await.unwrap(), CreateOutcome::ParentMissing);
    let mut voucher = stores.catalogue.voucher(held.voucher).await.unwrap().unwrap();
    voucher.id = VoucherId::new(8).unwrap();
    voucher.shop = ShopId::new(404).unwrap();
    assert_eq!(stores.catalogue.create_voucher(&voucher).await.unwrap(), CreateOutcome::ParentMissing);
    assert_eq!(stores.ledger.sales(Some(NOW)).await.unwrap().len(), 1);
    assert_eq!(stores.ledger.sales(Some(held.window.end)).await.unwrap(), []);
    assert_eq!(stores.ledger.sales(None).await.unwrap(), [held]);
}

pub async fn leases_never_overlap(stores: &Stores) {
    const SPAN: Duration = Duration::from_secs(60);
    let zero = Timestamp::from_ms(0);
    let only = stores.ledger.lease_worker("only", None, zero, SPAN).await.unwrap();
    assert!(!stores.ledger.has_other_workers("only").await.unwrap());
    assert!(stores.ledger.has_other_workers("another").await.unwrap());
    stores.ledger.return_worker("only", only.worker, only.until).await.unwrap();
    assert!(!stores.ledger.has_other_workers("another").await.unwrap(), "given back");
    let lease = |holder: String, worker, not_before| {
        let ledger = stores.ledger.clone();
        async move { ledger.lease_worker(&holder, worker, not_before, SPAN).await.unwrap() }
    };
    let many: Vec<_> = (0..32).map(|i| tokio::spawn(lease(format!("h{i}"), None, zero))).collect();
    let mut workers = HashSet::new();
    for one in many {
        let granted = one.await.unwrap();
        assert!(granted.from < granted.until);
        assert!(workers.insert(granted.worker), "two hold worker {:?}", granted.worker);
    }

    assert!(stores.ledger.has_other_workers("h0").await.unwrap());
    let mine = lease("me".into(), None, zero).await;
    let renewed = lease("me".into(), Some(mine.worker), mine.until).await;
    assert_eq!((renewed.worker, renewed.from), (mine.worker, mine.from));
    assert!(renewed.until >= mine.until.plus(SPAN), "reaches beyond not_before, though our clock is behind it");

    // A returned lease frees only the rest of its range for the next holder.
    let unused_from = mine.from.plus(Duration::from_millis(5));
    stores.ledger.return_worker("someone else", mine.worker, zero).await.unwrap();
    stores.ledger.return_worker("me", mine.worker, unused_from).await.unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    let next = loop {
        // The worker is free once the ledger's clock has passed `unused_from`.
        let next = lease("next".into(), None, zero).await;
        if next.worker == mine.worker {
            break next;
        }
        assert!(std::time::Instant::now() < deadline, "the worker never became free");
    };
    assert!(next.from >= unused_from);
    let stale = lease("me".into(), Some(mine.worker), zero).await;
    assert_ne!(stale.worker, mine.worker, "a worker that another holds is not renewed");
    assert!(stale.worker < WorkerId(1024));
}

pub async fn snowflakes_do_not_follow_ids_of_a_counter(stores: &Stores) {
    for (kind, allowed) in [
        (IdKind::Snowflake, true),
        (IdKind::Snowflake, true),
        (IdKind::Counter, true),
        (IdKind::Counter, true),
        (IdKind::Snowflake, false),
    ] {
        assert_eq!(stores.ledger.claim_id_kind(kind).await.unwrap(), allowed, "{kind:?}");
    }
}

pub async fn missing_sale_is_poison(stores: &Stores) {
    let nowhere = SaleId::new(404).unwrap();
    let error = stores.ledger.record(nowhere, E1, &batch(&[(1, 1)])).await.unwrap_err();
    assert!(matches!(error, ports::LedgerError::Poison(_)), "{error:?}");
    assert_eq!(stores.ledger.order(order(1)).await.unwrap(), None);
}

pub async fn audit_log_is_append_only(stores: &Stores) {
    crate::audit::is_append_only(stores).await;
}
