//! Decides on one request to buy.

use std::time::Instant;

use stampede_core::ports::gate::AdmitRequest;
use stampede_core::ports::{Admitted, Decision, GateError};
use stampede_core::{Refusal, SaleId};

use super::super::{AdmitOutcome, AnswerAfter, QueueConfig, RollForwardOutcome, Tier as _, time_of_mark};
use super::{Answer, Job, RedisTier, recovery};
use crate::error::Error;
use crate::recording::Pending;
use crate::retention::is_past_retention;

pub(super) async fn admit(tier: &RedisTier, sale: SaleId, request: AdmitRequest) -> Result<AdmitOutcome, Error> {
    tier.can_admit()?;
    if tier.gate.opened_as(sale).is_none() {
        // Only sales that the ledger calls open are sent to the gate.
        let now = tier.context.clock.now();
        match tier.context.sale_index.get(sale).filter(|sale| !is_past_retention(sale, now)) {
            // Another node may have opened it a moment ago: the seller asks the ledger, once for all requests that wait.
            Some(sale) if recovery::is_new(&sale) => {}
            Some(_) => return Err(GateError::NotOpen.into()),
            None => return Ok(AdmitOutcome::Refused(Refusal::NoSuchSale)),
        }
    }
    // The wait begins before the order is in the queue, so that its outcome is not missed.
    let wait = match tier.delivery.queue() {
        Some(QueueConfig { answer_after: AnswerAfter::Ledger, .. }) => {
            Some(tier.outcomes.wait_for_new(sale, request.order)?)
        }
        Some(_) | None => None,
    };
    Ok(match tier.submit(sale, Job::Admit(request)).await? {
        Answer::Admitted { decision, outcome } => AdmitOutcome::Admitted { decision, outcome },
        Answer::Accepted => match wait {
            Some(wait) => AdmitOutcome::Recorded(wait.recorded().await.ok_or(Error::OutcomeUnknown)?),
            None => AdmitOutcome::Accepted,
        },
        Answer::AlreadyHas { order, decision, asked_at } => AdmitOutcome::AlreadyHas { order, decision, asked_at },
        Answer::Refused(refusal) => AdmitOutcome::Refused(refusal),
        Answer::RolledForward(_) => return Err(Error::OutcomeUnknown),
    })
}

pub(super) async fn roll_forward(
    tier: &RedisTier,
    sale: SaleId,
    held: AdmitRequest,
    decision: Decision,
    asked_at: Instant,
) -> Result<RollForwardOutcome, Error> {
    // The decision is that of this request. The time and the sequence number of the admission are not known.
    let at = time_of_mark(tier.context.sale_index.get(sale).as_deref(), decision.at);
    let admitted = Admitted { order: held.order, user: held.user, seq: 0, at };
    let pending = Pending { epoch: decision.epoch, admitted };
    if let Some(queue) = tier.delivery.queue() {
        // In Redis a mark is as good as an entry of the queue: a rebuild records both. RabbitMQ outlives Redis, so there the order must be
        // confirmed by the broker.
        if tier.broker.is_some() {
            tier.submit(sale, Job::RollForward(pending)).await?;
        }
        // Later than this, the gate may have been rebuilt.
        return match queue.answer_after {
            AnswerAfter::Ledger => {
                let order = tier.outcomes.wait_for(sale, held.order)?.recorded().await;
                order.map(RollForwardOutcome::Recorded).ok_or(Error::OutcomeUnknown)
            }
            AnswerAfter::Queue if asked_at.elapsed() < queue.accept_within => Ok(RollForwardOutcome::Accepted),
            AnswerAfter::Queue => Err(Error::OutcomeUnknown),
        };
    }
    match tier.submit(sale, Job::RollForward(pending)).await? {
        Answer::RolledForward(outcome) => Ok(RollForwardOutcome::Submitted(outcome)),
        Answer::Admitted { .. } | Answer::Accepted | Answer::AlreadyHas { .. } | Answer::Refused(_) => {
            Err(Error::OutcomeUnknown)
        }
    }
}
