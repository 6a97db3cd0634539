//! What buyers heard, against what the ledger holds.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::Instant;

use stampede_core::{OrderId, SaleId, UserId};
use stampede_ledger::Stores;
use stampede_testkit::Client;

use crate::shop::Buyer;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// 201 or 200, with the order.
    Order(OrderId, u16),
    /// A definite no, by its code.
    No(String),
    /// 503, or no answer at all.
    Unknown,
}

#[derive(Debug, Clone)]
struct Attempt {
    user: UserId,
    heard: Heard,
    invoked: Instant,
    ended: Instant,
}

/// Every attempt of every buyer.
#[derive(Debug, Default)]
pub struct History(Mutex<Vec<Attempt>>);

impl History {
    /// One try to buy, recorded.
    pub async fn buy(&self, client: &mut Client, sale: SaleId, buyer: &Buyer) -> Heard {
        let path = format!("/v1/sales/{sale}/orders");
        let invoked = Instant::now();
        let heard = match client.post(&path, &buyer.token, &serde_json::Value::Null).await {
            Ok(reply) if reply.status == 201 || reply.status == 200 => {
                Heard::Order(reply.text("id").parse().unwrap(), reply.status.as_u16())
            }
            Ok(reply) if reply.status == 503 => Heard::Unknown,
            Ok(reply) => Heard::No(reply.text("code")),
            Err(_) => Heard::Unknown,
        };
        let (user, ended) = (buyer.id.parse().unwrap(), Instant::now());
        self.0.lock().unwrap().push(Attempt { user, heard: heard.clone(), invoked, ended });
        heard
    }

    pub fn all(&self) -> Vec<(UserId, Heard)> {
        self.0.lock().unwrap().iter().map(|attempt| (attempt.user, attempt.heard.clone())).collect()
    }

    /// How many heard 201.
    pub fn created(&self) -> usize {
        self.all().iter().filter(|(_, heard)| matches!(heard, Heard::Order(_, 201))).count()
    }

    /// sold = live rows ≤ total; one a person; ok ⊆ ledger ⊆ ok ∪ unknown. Returns how many were sold.
    pub async fn check(&self, stores: &Stores, sale: SaleId) -> usize {
        let loaded = stores.ledger.load(sale).await.unwrap().expect("the sale is gone");
        let rows: HashMap<UserId, OrderId> = loaded.marks.iter().copied().collect();
        assert_eq!(rows.len(), loaded.marks.len(), "somebody has two live orders");
        assert_eq!(loaded.sale.sold as usize, rows.len(), "sold is not the live rows");
        assert!(loaded.sale.sold <= loaded.sale.total, "oversold");

        let mut attempted = HashSet::new();
        for (user, heard) in self.all() {
            match heard {
                Heard::Order(order, _) => {
                    assert_eq!(rows.get(&user), Some(&order), "user {user} was promised {order}");
                    attempted.insert(user);
                }
                Heard::Unknown => _ = attempted.insert(user),
                Heard::No(_) => {}
            }
        }
        self.check_asked_again();
        let unexpected: Vec<_> = rows.keys().filter(|user| !attempted.contains(user)).collect();
        assert!(unexpected.is_empty(), "rows of people who heard no or never asked: {unexpected:?}");
        rows.len()
    }

    /// Who asked after he was told his order was told the same order, and never no.
    fn check_asked_again(&self) {
        let attempts = self.0.lock().unwrap().clone();
        let mut told: HashMap<UserId, (OrderId, Instant)> = HashMap::new();
        for attempt in &attempts {
            if let Heard::Order(order, _) = attempt.heard {
                let first = told.entry(attempt.user).or_insert((order, attempt.ended));
                first.1 = first.1.min(attempt.ended);
            }
        }
        for Attempt { user, heard, invoked, .. } in &attempts {
            if let (Some((order, since)), Heard::No(code)) = (told.get(user), heard)
                && since < invoked
            {
                panic!("{user} had {order} and was then told {code}");
            }
        }
    }
}
