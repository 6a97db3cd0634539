//! Admits the requests of one sale in the gate, one call for a batch. The admitted orders are in the outbox.
//!
//! With Redis Streams that is all: consumers find them there. With RabbitMQ the batch is published, and its entry is settled once the
//! broker has confirmed the message; buyers are answered before that. Without a confirm the entry stays in the outbox, and any node
//! publishes it later ([`super::relay`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Admitted, Decision, GateError};
use stampede_core::{Admission, Refusal, SaleId, failpoint};
use stampede_queue::{Batch, QueueError};

use super::super::redis::{Answer, Job, Seller};
use super::super::shielded::{Generation, Shield};
use super::broker::Broker;
use crate::batcher::Backend;
use crate::recording::Pending;

pub(in crate::tier) struct Admitter {
    sale: SaleId,
    seller: Arc<Seller>,
    accept_within: Duration,
    shield: Option<Arc<Shield>>,
    /// Where admitted orders are published; `None` if the outbox is the queue.
    broker: Option<Arc<Broker>>,
}

impl Admitter {
    pub(in crate::tier) const fn new(
        sale: SaleId,
        seller: Arc<Seller>,
        accept_within: Duration,
        shield: Option<Arc<Shield>>,
        broker: Option<Arc<Broker>>,
    ) -> Self {
        Self { sale, seller, accept_within, shield, broker }
    }

    /// Tells the shield what the gate has answered.
    fn note(&self, decisions: &[Decision]) {
        let (Some(shield), Some(last)) = (&self.shield, decisions.last()) else { return };
        let generation = Generation { epoch: last.epoch, number: last.generation };
        let refusal = decisions.iter().find_map(|decision| match decision.admission {
            Admission::Refused(refusal) => Some(refusal),
            Admission::Admitted(_) | Admission::AlreadyHas(_) | Admission::Busy => None,
        });
        match refusal {
            Some(refusal @ (Refusal::SoldOut | Refusal::NotStarted | Refusal::Ended)) => {
                shield.refused(self.sale, generation, refusal);
            }
            Some(Refusal::Paused | Refusal::NoSuchSale) | None => shield.note(self.sale, generation),
        }
    }

    /// Publishes orders, one message for each epoch, which is one as a rule. Returns whether all of them are confirmed.
    async fn publish(&self, broker: &Broker, pending: &[Pending]) -> Result<(), QueueError> {
        for of_one_epoch in pending.chunk_by(|a, b| a.epoch == b.epoch) {
            let orders = of_one_epoch.iter().map(|pending| pending.admitted).collect();
            broker.publish(&Batch { sale: self.sale, epoch: of_one_epoch[0].epoch, orders }).await?;
        }
        failpoint::hit("queue.published");
        Ok(())
    }

    /// Whether the orders are safe in the queue. Later than `accept_within` after the admission began the gate may have been rebuilt
    /// without them, so they must not be confirmed.
    async fn is_safe(&self, pending: &[Pending], asked_at: Instant) -> bool {
        let is_in_time = || asked_at.elapsed() < self.accept_within;
        let Some(broker) = &self.broker else { return is_in_time() };
        if pending.is_empty() {
            return true;
        }
        let deadline = asked_at + self.accept_within;
        match tokio::time::timeout_at(deadline.into(), self.publish(broker, pending)).await {
            Ok(Ok(())) => is_in_time(),
            Ok(Err(error)) => {
                tracing::debug!(sale = %self.sale, %error, "orders were not confirmed; they stay in the outbox");
                false
            }
            Err(_) => false,
        }
    }
}

impl Backend<Job> for Admitter {
    type Answer = Result<Answer, GateError>;

    async fn call(&self, batch: &[Job]) -> Vec<Result<Answer, GateError>> {
        let request = |job: &Job| match job {
            Job::Admit(request) => Some(*request),
            Job::RollForward(_) => None,
        };
        let requests: Vec<AdmitRequest> = batch.iter().filter_map(request).collect();
        let asked_at = Instant::now();
        let (decisions, entry, failed) = match self.seller.admit(&requests).await {
            Ok((decisions, entry)) => (decisions, entry, None),
            Err(error) => (Vec::new(), None, Some(error)),
        };
        self.note(&decisions);
        let admitted = |(request, decision): (&AdmitRequest, &Decision)| match decision.admission {
            Admission::Admitted(order) => {
                let admitted = Admitted { order, user: request.user, seq: decision.seq, at: decision.at };
                Some(Pending { epoch: decision.epoch, admitted })
            }
            _ => None,
        };
        let mut pending: Vec<Pending> = requests.iter().zip(&decisions).filter_map(admitted).collect();
        // Orders that hold a mark and have no row are published again. Their callers check the time since they asked for the mark.
        pending.extend(batch.iter().filter_map(|job| match job {
            Job::RollForward(held) => Some(*held),
            Job::Admit(_) => None,
        }));
        let is_safe = self.is_safe(&pending, asked_at).await;
        if let Some(entry) = entry.filter(|_| is_safe && self.broker.is_some()) {
            self.seller.settle(entry);
        }
        let mut decisions = decisions.into_iter();
        let answer = |job: &Job| {
            let decision = match job {
                Job::Admit(_) => decisions.next().ok_or(failed.unwrap_or(GateError::Unanswered))?,
                Job::RollForward(_) if is_safe => return Ok(Answer::Accepted),
                Job::RollForward(_) => return Err(GateError::Unanswered),
            };
            match decision.admission {
                Admission::Admitted(_) if is_safe => Ok(Answer::Accepted),
                Admission::Admitted(_) => Err(GateError::Unanswered),
                Admission::AlreadyHas(order) => Ok(Answer::AlreadyHas { order, decision, asked_at }),
                Admission::Refused(refusal) => Ok(Answer::Refused(refusal)),
                Admission::Busy => Err(GateError::Busy),
            }
        };
        batch.iter().map(answer).collect()
    }
}
