use super::*;
use proptest::prelude::*;
use stampede_core::{SalePhase, VoucherId};

const BEGIN_MS: i64 = 1_000;
const END_MS: i64 = 2_000;

fn sale(cap: u32, version: i64, status: SaleStatus) -> Sale {
    Sale {
        id: SaleId::new(1).unwrap(),
        voucher: VoucherId::new(1).unwrap(),
        title: String::new(),
        price: Money::from_cents(5).unwrap(),
        worth: Money::from_cents(9).unwrap(),
        status,
        window: Window { begin: Timestamp::from_ms(BEGIN_MS), end: Timestamp::from_ms(END_MS) },
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

fn gate(cap: u32) -> MemoryGate {
    let gate = MemoryGate::new();
    gate.open(LoadedSale { sale: sale(cap, 1, SaleStatus::OnSale), marks: Vec::new(), ended: Vec::new() });
    gate
}

fn user(n: i64) -> UserId {
    UserId::new(n).unwrap()
}

fn order(n: i64) -> OrderId {
    OrderId::new(n).unwrap()
}

fn admit(gate: &MemoryGate, u: i64, o: i64, at_ms: i64) -> Admission {
    let now = Timestamp::from_ms(at_ms);
    match gate.admit(sale(0, 0, SaleStatus::Draft).id, user(u), order(o), now) {
        Some(decision) => decision.admission,
        None => Admission::Refused(Refusal::NoSuchSale),
    }
}

fn release(gate: &MemoryGate, user: UserId, order: OrderId) -> bool {
    gate.release(SaleId::new(1).unwrap(), &Release { user, order, existing: None, ended: false })
}

fn refused(refusal: Refusal) -> Admission {
    Admission::Refused(refusal)
}

#[test]
fn admissions_never_go_back_in_time() {
    let gate = gate(5);
    assert_eq!(admit(&gate, 1, 1, 999), refused(Refusal::NotStarted));
    assert_eq!(admit(&gate, 1, 1, 1000), Admission::Admitted(order(1)));
    assert_eq!(admit(&gate, 2, 2, 2000), refused(Refusal::Ended));
    assert_eq!(admit(&gate, 2, 2, 900), Admission::Admitted(order(2)), "the clock went back behind an admission");
    assert_eq!(admit(&gate, 1, 3, 2000), Admission::AlreadyHas(order(1)));
}

#[test]
fn reload_keeps_marks_of_orders_on_their_way() {
    let gate = gate(5);
    let id = SaleId::new(1).unwrap();
    for n in 1..=3 {
        admit(&gate, n, n, 1500);
    }
    gate.settle(id, [(user(1), order(1)), (user(2), order(2))]);
    // The ledger has 1, and 9 that another process sold; 2 was cancelled there; 3 is still on its way.
    let loaded = LoadedSale {
        sale: sale(5, 2, SaleStatus::OnSale),
        marks: vec![(user(1), order(1)), (user(9), order(9))],
        ended: Vec::new(),
    };

    let before = gate.releases(id).unwrap();
    release(&gate, user(1), order(1));
    assert!(!gate.reload(loaded.clone(), before), "what was read is older than a release");

    let before = gate.releases(id).unwrap();
    assert!(gate.reload(loaded, before));
    let mut marks = gate.marks(id).unwrap();
    marks.sort();
    assert_eq!(marks, [(user(1), order(1)), (user(3), order(3)), (user(9), order(9))]);
    assert_eq!((gate.snapshot(id).unwrap().marks, gate.snapshot(id).unwrap().settled), (3, 2));

    // An edit that came after the read stays.
    gate.edit(&sale(7, 9, SaleStatus::Paused));
    let older = LoadedSale { sale: sale(5, 8, SaleStatus::OnSale), marks: vec![], ended: Vec::new() };
    assert!(gate.reload(older, gate.releases(id).unwrap()));
    let seen = gate.snapshot(id).unwrap();
    assert_eq!((seen.version, seen.status, seen.cap), (9, SaleStatus::Paused, 7));
}

/// Orders on their way that come too late, because other processes sold everything, must not leave stock behind that does not exist.
#[test]
fn reload_raises_the_cap_only_temporarily() {
    let gate = gate(2);
    let id = SaleId::new(1).unwrap();
    admit(&gate, 1, 1, 1500);
    let sold_out = LoadedSale {
        sale: sale(2, 1, SaleStatus::OnSale),
        marks: vec![(user(8), order(8)), (user(9), order(9))],
        ended: Vec::new(),
    };
    assert!(gate.reload(sold_out, gate.releases(id).unwrap()));
    let seen = gate.snapshot(id).unwrap();
    assert_eq!((seen.marks, seen.cap, seen.remaining()), (3, 3, 0));
    release(&gate, user(1), order(1));
    let seen = gate.snapshot(id).unwrap();
    assert_eq!((seen.marks, seen.cap, seen.remaining()), (2, 2, 0));
    assert_eq!(admit(&gate, 2, 2, 1500), refused(Refusal::SoldOut));
}

proptest! {
    /// Against the plainest model there is: a list of who has what.
    #[test]
    fn agrees_with_a_plain_model(
        cap in 0..4u32,
        steps in proptest::collection::vec((1..6i64, 1..20i64, 900..2100i64, any::<bool>()), 0..60),
    ) {
        let gate = gate(cap);
        let (mut held, mut clock): (Vec<(i64, i64)>, i64) = (Vec::new(), 0);
        for (u, o, at, releases) in steps {
            if releases {
                let expected = held.contains(&(u, o));
                held.retain(|&mark| mark != (u, o));
                prop_assert_eq!(release(&gate, user(u), order(o)), expected);
                continue;
            }
            let now = clock.max(at);
            let expected = match held.iter().find(|mark| mark.0 == u) {
                Some(&(_, has)) if has == o => Admission::Admitted(order(o)),
                Some(&(_, has)) => Admission::AlreadyHas(order(has)),
                None if now >= END_MS => refused(Refusal::Ended),
                None if now < BEGIN_MS => refused(Refusal::NotStarted),
                None if held.len() >= cap as usize => refused(Refusal::SoldOut),
                None => {
                    held.push((u, o));
                    clock = now;
                    Admission::Admitted(order(o))
                }
            };
            prop_assert_eq!(admit(&gate, u, o, at), expected);
            prop_assert_eq!(gate.snapshot(SaleId::new(1).unwrap()).unwrap().remaining() as usize, cap as usize - held.len());
        }
    }
}
