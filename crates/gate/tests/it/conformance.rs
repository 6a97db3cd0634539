//! The part of the suite that is common to all gates. Gates on a server use their own clock, so windows are placed around the
//! present time.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::gate::{AdmitRequest, Release};
use stampede_core::ports::{Decision, Gate, GateError, LoadedSale, Snapshot};
use stampede_core::*;

const HOUR: Duration = Duration::from_secs(3600);

pub fn id() -> SaleId {
    SaleId::new(1).unwrap()
}

pub fn sale(cap: u32, version: i64, status: SaleStatus) -> Sale {
    let now = SystemClock.now();
    Sale {
        id: id(),
        voucher: VoucherId::new(1).unwrap(),
        title: String::new(),
        price: Money::from_cents(5).unwrap(),
        worth: Money::from_cents(9).unwrap(),
        status,
        window: Window { begin: now.minus(HOUR), end: now.plus(HOUR) },
        total: cap,
        cap,
        sold: 0,
        epoch: Epoch(1),
        phase: SalePhase::Open,
        version,
        released: 0,
        payment_deadline_ms: 0,
        buy_again: true,
    }
}

pub fn request(user: i64, order: i64) -> AdmitRequest {
    AdmitRequest { user: UserId::new(user).unwrap(), order: OrderId::new(order).unwrap() }
}

fn order(n: i64) -> OrderId {
    OrderId::new(n).unwrap()
}

async fn open(gate: &dyn Gate, cap: u32) {
    gate.open(LoadedSale { sale: sale(cap, 1, SaleStatus::OnSale), marks: Vec::new(), ended: Vec::new() })
        .await
        .unwrap();
}

async fn decide(gate: &dyn Gate, user: i64, order: i64) -> Decision {
    let decisions = gate.admit(id(), &[request(user, order)], SystemClock.now()).await.unwrap().unwrap();
    decisions[0]
}

async fn admit(gate: &dyn Gate, user: i64, order: i64) -> Admission {
    decide(gate, user, order).await.admission
}

async fn release(gate: &dyn Gate, user: i64, order: i64, existing: Option<i64>) -> bool {
    let AdmitRequest { user, order } = request(user, order);
    let existing = existing.map(|existing| OrderId::new(existing).unwrap());
    gate.release(id(), &[Release { user, order, existing, ended: false }]).await.unwrap()[0]
}

async fn snapshot(gate: &dyn Gate) -> Snapshot {
    gate.snapshot(id()).await.unwrap().unwrap()
}

pub async fn sells_exactly_the_cap(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 2).await;
    let batch = [request(1, 11), request(1, 11), request(1, 12), request(2, 21), request(3, 31), request(2, 22)];
    let decisions = gate.admit(id(), &batch, SystemClock.now()).await.unwrap().unwrap();
    let admissions: Vec<_> = decisions.iter().map(|decision| decision.admission).collect();
    let expected = [
        Admission::Admitted(order(11)),
        // The same request again takes no further stock.
        Admission::Admitted(order(11)),
        Admission::AlreadyHas(order(11)),
        Admission::Admitted(order(21)),
        Admission::Refused(Refusal::SoldOut),
        Admission::AlreadyHas(order(21)),
    ];
    assert_eq!(admissions, expected);
    assert_eq!(admit(gate, 1, 13).await, Admission::AlreadyHas(order(11)));
    assert_eq!((snapshot(gate).await.marks, snapshot(gate).await.remaining()), (2, 0));
    assert!(decisions[0].seq < decisions[3].seq, "{decisions:?}");
}

pub async fn an_unknown_sale_has_no_decisions(gate: Arc<dyn Gate>) {
    open(gate.as_ref(), 1).await;
    let unknown = SaleId::new(2).unwrap();
    assert_eq!(gate.admit(unknown, &[request(1, 1)], SystemClock.now()).await.unwrap(), None);
    assert_eq!(gate.snapshot(unknown).await.unwrap(), None);
    assert_eq!(gate.marks(unknown).await.unwrap(), None);
    let releases = [Release { user: UserId::new(1).unwrap(), order: order(1), existing: None, ended: false }];
    // A gate on a server may be about to load it.
    let released = gate.release(unknown, &releases).await;
    assert!(released == Ok(vec![false]) || released == Err(GateError::NotOpen), "{released:?}");
}

pub async fn status_and_window_decide_before_stock(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 1).await;
    let refused = |refusal| Admission::Refused(refusal);
    let now = SystemClock.now();
    let window = |begin, end| Sale { window: Window { begin, end }, ..sale(1, 0, SaleStatus::OnSale) };
    let steps = [
        (sale(1, 2, SaleStatus::Paused), refused(Refusal::Paused)),
        (window(now.plus(HOUR), now.plus(HOUR * 2)), refused(Refusal::NotStarted)),
        (window(now.minus(HOUR * 2), now.minus(HOUR)), refused(Refusal::Ended)),
        (sale(1, 0, SaleStatus::Draft), refused(Refusal::NoSuchSale)),
        (sale(1, 0, SaleStatus::OnSale), Admission::Admitted(order(1))),
        (sale(1, 0, SaleStatus::Paused), Admission::AlreadyHas(order(1))),
        (sale(1, 0, SaleStatus::OnSale), Admission::AlreadyHas(order(1))),
    ];
    for &refusal in Refusal::ALL.iter().filter(|refusal| **refusal != Refusal::SoldOut) {
        assert!(steps.iter().any(|(_, expected)| *expected == refused(refusal)), "add a step for {refusal:?}");
    }
    for (version, (sale, expected)) in (2..).zip(steps) {
        gate.edit(&Sale { version, ..sale }).await.unwrap();
        let order = if expected == Admission::AlreadyHas(order(1)) { 2 } else { 1 };
        assert_eq!(admit(gate, 1, order).await, expected, "version {version}");
    }
}

pub async fn an_older_version_is_ignored(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 1).await;
    assert_eq!(gate.edit(&sale(5, 3, SaleStatus::Paused)).await.unwrap(), Some(5));
    assert_eq!(gate.edit(&sale(9, 2, SaleStatus::OnSale)).await.unwrap(), Some(5));
    assert_eq!(admit(gate, 1, 1).await, Admission::Refused(Refusal::Paused));
    assert_eq!((snapshot(gate).await.version, snapshot(gate).await.cap), (3, 5));
}

pub async fn a_release_removes_its_own_mark_once(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 1).await;
    admit(gate, 1, 11).await;
    assert!(!release(gate, 1, 12, None).await, "another order");
    assert!(!release(gate, 2, 11, None).await, "another user");
    assert!(release(gate, 1, 11, Some(10)).await, "the ledger has another live order");
    assert_eq!(admit(gate, 1, 13).await, Admission::AlreadyHas(order(10)));
    assert!(release(gate, 1, 10, None).await);
    assert!(!release(gate, 1, 10, None).await);
    assert_eq!(snapshot(gate).await.remaining(), 1);
}

pub async fn the_cap_never_falls_below_the_marks(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 3).await;
    for n in 1..=3 {
        admit(gate, n, n).await;
    }
    assert_eq!(gate.edit(&sale(1, 2, SaleStatus::OnSale)).await.unwrap(), Some(3));
    assert_eq!(gate.edit(&sale(4, 3, SaleStatus::OnSale)).await.unwrap(), Some(4));
    assert_eq!(admit(gate, 4, 4).await, Admission::Admitted(order(4)));
}

pub async fn opening_again_changes_nothing(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 2).await;
    admit(gate, 1, 1).await;
    open(gate, 7).await;
    assert_eq!((snapshot(gate).await.marks, snapshot(gate).await.cap), (1, 2));
}

pub async fn nobody_buys_again_where_that_is_forbidden(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    let once = Sale { buy_again: false, ..sale(3, 1, SaleStatus::OnSale) };
    let (earlier, loaded) = (UserId::new(7).unwrap(), vec![(UserId::new(7).unwrap(), order(70))]);
    gate.open(LoadedSale { sale: once, marks: Vec::new(), ended: loaded }).await.unwrap();
    assert_eq!(admit(gate, earlier.get(), 71).await, Admission::AlreadyHas(order(70)), "the ledger knew of it");

    for n in 1..=3 {
        assert_eq!(admit(gate, n, n).await, Admission::Admitted(order(n)));
    }
    let end = async |n: i64, ended: bool| {
        let AdmitRequest { user, order } = request(n, n);
        gate.release(id(), &[Release { user, order, existing: None, ended }]).await.unwrap()[0]
    };
    assert!(end(1, true).await);
    assert!(end(2, false).await, "rejected: it was never an order");
    assert_eq!(snapshot(gate).await.remaining(), 2, "the stock is sold again, to others");
    assert_eq!(admit(gate, 1, 11).await, Admission::AlreadyHas(order(1)));
    assert_eq!(admit(gate, 2, 12).await, Admission::Admitted(order(12)));
    assert_eq!(admit(gate, 4, 14).await, Admission::Admitted(order(14)));
    assert_eq!(admit(gate, 1, 13).await, Admission::AlreadyHas(order(1)), "also after the sell-out");
    assert!(!end(2, true).await, "the mark belongs to another order by now");
    assert!(end(3, true).await);
    assert!(!end(3, true).await, "once");
    assert_eq!((snapshot(gate).await.marks, gate.marks(id()).await.unwrap().unwrap().len()), (2, 2));
}

pub async fn the_generation_rises_with_releases_and_edits(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 1).await;
    let pair = |decision: Decision| (decision.epoch.0, decision.generation);
    let admitted = pair(decide(gate, 1, 1).await);
    let sold_out = pair(decide(gate, 2, 2).await);
    assert_eq!(admitted, sold_out, "an admission leaves it as it is");
    release(gate, 1, 9, None).await;
    assert_eq!(pair(decide(gate, 2, 2).await), sold_out, "a release of nothing leaves it as it is");
    release(gate, 1, 1, None).await;
    let released = pair(decide(gate, 2, 2).await);
    assert!(released > sold_out);
    gate.edit(&sale(5, 2, SaleStatus::OnSale)).await.unwrap();
    assert!(pair(decide(gate, 3, 3).await) > released);
}

pub async fn digest_and_marks_agree(gate: Arc<dyn Gate>) {
    let gate = gate.as_ref();
    open(gate, 10).await;
    for n in 1..=5 {
        admit(gate, n, 10 + n).await;
    }
    let marks = gate.marks(id()).await.unwrap().unwrap();
    let (seen, digest) = gate.digest(id()).await.unwrap().unwrap();
    assert_eq!((seen.marks as usize, seen.settled), (marks.len(), 0));
    assert_eq!(digest, mark_digest(marks.into_iter()));
}

/// Eight tasks, many times the stock, releases in between: the marks never exceed the cap.
pub async fn concurrent_buyers_get_exactly_the_cap(gate: Arc<dyn Gate>) {
    const CAP: u32 = 100;
    open(gate.as_ref(), CAP).await;
    let tasks = (0..8_i64).map(|task| {
        let gate = gate.clone();
        tokio::spawn(async move {
            for i in 0..500_i64 {
                let (user, order) = (1 + (i * 7 + task) % 500, 1 + i * 8 + task);
                let admitted = admit(gate.as_ref(), user, order).await == Admission::Admitted(self::order(order));
                if admitted && i % 3 == 0 {
                    assert!(release(gate.as_ref(), user, order, None).await, "the mark belongs to this order");
                }
                assert!(snapshot(gate.as_ref()).await.marks <= CAP);
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(snapshot(gate.as_ref()).await.marks, CAP);
    assert_eq!(gate.marks(id()).await.unwrap().unwrap().len(), CAP as usize);
}
