//! Admits the requests of one sale in the gate, one call for a batch. The admitted orders are in the outbox, where consumers find them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Decision, GateError};
use stampede_core::{Admission, Refusal, SaleId};

use super::super::redis::{Answer, Job, Seller};
use super::super::shielded::{Generation, Shield};
use crate::batcher::Backend;

pub(in crate::tier) struct Admitter {
    sale: SaleId,
    seller: Arc<Seller>,
    accept_within: Duration,
    shield: Option<Arc<Shield>>,
}

impl Admitter {
    pub(in crate::tier) const fn new(
        sale: SaleId,
        seller: Arc<Seller>,
        accept_within: Duration,
        shield: Option<Arc<Shield>>,
    ) -> Self {
        Self { sale, seller, accept_within, shield }
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
}

impl Backend<Job> for Admitter {
    type Answer = Result<Answer, GateError>;

    async fn call(&self, batch: &[Job]) -> Vec<Result<Answer, GateError>> {
        let request = |job: &Job| match job {
            Job::Admit(request) => Some(*request),
            // Consumers record what is in the outbox.
            Job::RollForward(_) => None,
        };
        let requests: Vec<AdmitRequest> = batch.iter().filter_map(request).collect();
        let asked_at = Instant::now();
        let (decisions, failed) = match self.seller.admit(&requests).await {
            Ok((decisions, _entry)) => (decisions, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        self.note(&decisions);
        // After this time the gate may have been rebuilt without the orders, so they must not be confirmed.
        let is_in_time = asked_at.elapsed() < self.accept_within;
        let mut decisions = decisions.into_iter();
        let answer = |job: &Job| {
            let next = match job {
                Job::Admit(_) => decisions.next(),
                Job::RollForward(_) => None,
            };
            let Some(decision) = next else { return Err(failed.unwrap_or(GateError::Unanswered)) };
            match decision.admission {
                Admission::Admitted(_) if is_in_time => Ok(Answer::Accepted),
                Admission::Admitted(_) => Err(GateError::Unanswered),
                Admission::AlreadyHas(order) => Ok(Answer::AlreadyHas { order, decision, asked_at }),
                Admission::Refused(refusal) => Ok(Answer::Refused(refusal)),
                Admission::Busy => Err(GateError::Busy),
            }
        };
        batch.iter().map(answer).collect()
    }
}
