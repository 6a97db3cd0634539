//! What buyers were told, checked against ledger and gates with the invariants that `stampede check` has.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stampede_core::{OrderId, SaleId, UserId};
use stampede_proof::check::{self, Line, Patience, Rules};
use stampede_proof::generator::Pulse;
use stampede_proof::history::{Action, Attempt};
use stampede_proof::system::System;
use stampede_testkit::{Client, Reply};

use crate::shop::{Buyer, Place, Shop, TOKEN, read_only};

pub use stampede_proof::history::Heard;

/// How long a system may take to come to rest.
const AT_REST: Patience = Patience { lasting: Duration::from_secs(20), every: Duration::from_millis(100) };

/// The end of an attempt that has none yet.
const UNDER_WAY: u64 = u64::MAX;

/// Every attempt of every buyer.
#[derive(Debug)]
pub struct History {
    /// An attempt that is under way is there as unknown, without an end.
    attempts: Mutex<Vec<Attempt>>,
    clock: Arc<Pulse>,
    rules: Rules,
}

impl Default for History {
    fn default() -> Self {
        Self::with(Rules::default())
    }
}

impl History {
    /// Of a system whose clocks may be this far apart.
    pub fn with(rules: Rules) -> Self {
        Self { attempts: Mutex::default(), clock: Pulse::new(), rules: Rules { at_rest: true, ..rules } }
    }

    /// One attempt to buy, recorded.
    pub async fn buy(&self, client: &mut Client, sale: SaleId, buyer: &Buyer) -> Attempt {
        let path = format!("/v1/sales/{sale}/orders");
        self.send(client, &path, Action::Buy, (sale, buyer, None), |reply| match reply.status.as_u16() {
            201 => Heard::Created,
            200 => Heard::Already,
            _ => refusal(reply),
        })
        .await
    }

    /// One cancellation, recorded.
    pub async fn cancel(&self, client: &mut Client, sale: SaleId, buyer: &Buyer, order: OrderId) -> Attempt {
        let path = format!("/v1/orders/{order}/cancel");
        self.send(client, &path, Action::Cancel, (sale, buyer, Some(order)), |reply| match reply.status.as_u16() {
            200 => Heard::Cancelled,
            _ => refusal(reply),
        })
        .await
    }

    async fn send(
        &self,
        client: &mut Client,
        path: &str,
        action: Action,
        (sale, buyer, order): (SaleId, &Buyer, Option<OrderId>),
        judge: impl Fn(&Reply) -> Heard,
    ) -> Attempt {
        let (user, start_us): (UserId, u64) = (buyer.id.parse().unwrap(), self.clock.us(Instant::now()));
        let mut attempt = Attempt { action, sale, user, start_us, end_us: UNDER_WAY, heard: Heard::Unknown, order };
        let place = {
            let mut attempts = self.attempts.lock().unwrap();
            attempts.push(attempt);
            attempts.len() - 1
        };
        let reply = client.post(path, &buyer.token, &serde_json::Value::Null).await;
        attempt.end_us = self.clock.us(Instant::now());
        attempt.heard = reply.as_ref().map_or(Heard::Unknown, judge);
        attempt.order = order.or_else(|| reply.ok()?.text("id").parse().ok());
        self.attempts.lock().unwrap()[place] = attempt;
        attempt
    }

    /// Those that are over.
    pub fn all(&self) -> Vec<Attempt> {
        self.attempts.lock().unwrap().iter().filter(|attempt| attempt.end_us != UNDER_WAY).copied().collect()
    }

    /// How many attempts were answered so.
    pub fn count(&self, heard: Heard) -> usize {
        self.all().iter().filter(|attempt| attempt.heard == heard).count()
    }

    /// The invariants, from the database and from the gates of these nodes: all of them if it is stopped. Panics on a violation.
    /// Returns how many were sold.
    pub async fn check(&self, place: &Place, nodes: &[&Shop], sale: SaleId) -> usize {
        let ledger = Some(read_only(place).await);
        self.check_with(System { ledger, ..system(nodes) }, sale).await
    }

    /// The same, with the ledger read through the first node.
    pub async fn check_from_outside(&self, nodes: &[&Shop], sale: SaleId) -> usize {
        self.check_with(system(nodes), sale).await
    }

    async fn check_with(&self, system: System, sale: SaleId) -> usize {
        let (history, sales) = (self.attempts.lock().unwrap().clone(), [sale]);
        // Nothing changes in a stopped system: one look is enough.
        let stopped = Patience { lasting: Duration::ZERO, every: Duration::from_millis(1) };
        let patience = if system.admins.is_empty() { stopped } else { AT_REST };
        let gather = async || system.evidence_of(&sales).await;
        let (evidence, lines) = check::look(patience, self.rules, Some(&history), gather).await.unwrap();
        let failed: Vec<String> = lines.iter().filter(|line| line.failed()).map(Line::to_string).collect();
        assert!(failed.is_empty(), "{}", failed.join("\n"));
        if let Some(ledger) = system.ledger {
            ledger.close().await;
        }
        evidence[0].ledger.orders.iter().filter(|row| row.live).count()
    }
}

fn system(nodes: &[&Shop]) -> System {
    let admins = nodes.iter().map(|shop| shop.address).collect();
    System { addresses: Vec::new(), admins, token: TOKEN.to_owned(), nodes: Vec::new(), ledger: None }
}

fn refusal(reply: &Reply) -> Heard {
    match reply.status.as_u16() {
        503 => Heard::Unknown,
        _ => Heard::refusal(&reply.text("code")).unwrap_or(Heard::Wrong),
    }
}
