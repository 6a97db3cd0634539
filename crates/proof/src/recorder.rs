//! Records attempts that are made through an HTTP client, so that they can be checked.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use serde_json::Value;
use stampede_core::{OrderId, SaleId, UserId};

use crate::generator::RunClock;
use crate::history::{Action, Attempt, Response};
use crate::http::Client;

/// The end of an attempt that has not ended yet.
const NOT_ENDED: u64 = u64::MAX;

/// A user with a session.
#[derive(Debug, Clone)]
pub struct Buyer {
    pub id: UserId,
    pub token: String,
}

/// Every attempt of every buyer.
#[derive(Debug)]
pub struct Recorder {
    /// An attempt without a response is present as unknown, without an end.
    attempts: Mutex<Vec<Attempt>>,
    clock: Arc<RunClock>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new(RunClock::new())
    }
}

impl Recorder {
    pub fn new(clock: Arc<RunClock>) -> Self {
        Self { attempts: Mutex::default(), clock }
    }

    /// Attempts to buy.
    pub async fn buy(&self, client: &mut Client, sale: SaleId, buyer: &Buyer) -> Attempt {
        let path = format!("/v1/sales/{sale}/orders");
        self.send(client, &path, Action::Buy, (sale, buyer, None)).await
    }

    /// Attempts to cancel an order.
    pub async fn cancel(&self, client: &mut Client, sale: SaleId, buyer: &Buyer, order: OrderId) -> Attempt {
        let path = format!("/v1/orders/{order}/cancel?sale={sale}");
        self.send(client, &path, Action::Cancel, (sale, buyer, Some(order))).await
    }

    async fn send(
        &self,
        client: &mut Client,
        path: &str,
        action: Action,
        (sale, buyer, order): (SaleId, &Buyer, Option<OrderId>),
    ) -> Attempt {
        let start_us = self.clock.us(Instant::now());
        let (user, response) = (buyer.id, Response::Unknown);
        let mut attempt = Attempt { action, sale, user, start_us, end_us: NOT_ENDED, response, order };
        let index = {
            let mut attempts = self.attempts.lock();
            attempts.push(attempt);
            attempts.len() - 1
        };
        let reply = client.post(path, &buyer.token, &Value::Null).await;
        attempt.end_us = self.clock.us(Instant::now());
        attempt.response = reply.as_ref().map_or(Response::Unknown, |reply| Response::of(action, reply));
        attempt.order = order.or_else(|| reply.ok()?.text("id").parse().ok());
        self.attempts.lock()[index] = attempt;
        attempt
    }

    /// Adds an attempt that was not made through this recorder.
    pub fn add(&self, attempt: Attempt) {
        self.attempts.lock().push(attempt);
    }

    /// Removes the attempts of which `keep` is not true. None may be under way.
    pub fn retain(&self, keep: impl FnMut(&Attempt) -> bool) {
        self.attempts.lock().retain(keep);
    }

    /// Every attempt, including those that have not ended.
    pub fn all(&self) -> Vec<Attempt> {
        self.attempts.lock().clone()
    }

    /// The attempts that have ended.
    pub fn ended(&self) -> Vec<Attempt> {
        self.attempts.lock().iter().filter(|attempt| attempt.end_us != NOT_ENDED).copied().collect()
    }

    /// The number of attempts with this response.
    pub fn count(&self, response: Response) -> usize {
        self.ended().iter().filter(|attempt| attempt.response == response).count()
    }
}
