//! The bound of sales. No call reaches Redis.

use stampede_core::ports::GateRecord;
use stampede_core::{Epoch, Money, Sale, SalePhase, SaleStatus, Timestamp, VoucherId, Window};
use stampede_redis::{Client, Servers};

use super::*;

fn id(n: usize) -> SaleId {
    SaleId::new(n as i64).unwrap()
}

fn sale(n: usize) -> Sale {
    let price = Money::from_cents(100).unwrap();
    Sale {
        id: id(n),
        voucher: VoucherId::new(n as i64).unwrap(),
        title: String::new(),
        price,
        worth: price,
        status: SaleStatus::OnSale,
        window: Window { begin: Timestamp::from_ms(0), end: Timestamp::from_ms(1) },
        total: 1,
        cap: 1,
        sold: 0,
        epoch: Epoch(1),
        phase: SalePhase::Open,
        version: 1,
        released: 0,
    }
}

#[test]
fn sales_that_have_left_the_gate_make_room_and_others_do_not() {
    let servers = Servers::Single("redis://127.0.0.1:1/".to_owned());
    let client = Arc::new(Client::new(servers, Duration::from_secs(1), Duration::from_secs(1)).unwrap());
    let record = GateRecord { ledger_id: "test".to_owned(), incarnation: 1, replication_id: String::new() };
    let gate = Arc::new(RedisGate::new(client, &record, 1));
    let shield = Shield::new(ShieldConfig { expiry: Duration::from_secs(1), max_buyers: 1 }, gate.clone());
    let generation = Generation { epoch: Epoch(1), number: 0 };
    // The first one is not in the gate.
    for n in 2..=MAX_SALES + 2 {
        gate.adopt(&sale(n));
    }
    for n in 1..=MAX_SALES {
        shield.note(id(n), generation);
    }
    assert_eq!(shield.sales.read().len(), MAX_SALES);
    shield.note(id(MAX_SALES + 1), generation);
    assert!(shield.sales.read().contains_key(&id(MAX_SALES + 1)), "the first sale has made room");
    assert!(!shield.sales.read().contains_key(&id(1)));
    shield.note(id(MAX_SALES + 2), generation);
    assert!(!shield.sales.read().contains_key(&id(MAX_SALES + 2)), "requests for this one go to the gate");
    assert_eq!(shield.sales.read().len(), MAX_SALES);
}
