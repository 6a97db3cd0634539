//! The queue of one sale, and the tasks that serve it.

use std::sync::Arc;

use stampede_core::SaleId;
use stampede_core::ports::GateError;
use tokio_util::task::AbortOnDropHandle;

use super::super::Delivery;
use super::super::queued::admitter::Admitter;
use super::seller::{Answer, Job, Seller, SellerHandle};
use super::{RedisTier, RedisTierConfig};
use crate::batcher::{Abandoned, Batcher, Options};
use crate::error::Error;
use crate::recording::Recording;

/// The most requests in one call of the gate. Redis executes one script at a time, so a call must be short.
const MAX_ADMITTED_AT_ONCE: usize = 512;

/// The queue of one sale, and the tasks that serve it.
#[derive(Debug)]
pub(super) struct SaleQueue {
    seller: Arc<Seller>,
    batcher: Batcher<Job, Result<Answer, GateError>>,
    /// Retries orders that could not be recorded.
    retrying: AbortOnDropHandle<()>,
}

impl SaleQueue {
    /// Returns when every request has an answer.
    pub(super) async fn close(self) {
        let Self { seller, batcher, retrying } = self;
        batcher.close().await;
        drop(retrying);
        seller.close().await;
    }
}

impl RedisTier {
    /// What records the orders of a sale. [`Error::Busy`] once closed.
    pub(in crate::tier) fn seller(&self, sale: SaleId) -> Result<Arc<Seller>, Error> {
        self.with_queue(sale, |queue| queue.seller.clone())
    }

    /// Calls `act` with the sale's queue. [`Error::Busy`] once closed.
    fn with_queue<T>(&self, sale: SaleId, act: impl FnOnce(&SaleQueue) -> T) -> Result<T, Error> {
        self.queues.with(sale, || self.new_queue(sale), act)
    }

    fn new_queue(&self, sale: SaleId) -> SaleQueue {
        let RedisTierConfig { max_batch, queue_per_sale: queue, quarantine_after, .. } = self.config;
        let recording = Recording::new(sale, &self.context, quarantine_after);
        // With RabbitMQ an entry is settled when it is published.
        let announces = matches!(self.delivery, Delivery::Stream(..));
        let (gate, losses) = (self.gate.clone(), self.losses.clone());
        let (ledger, clock) = (self.context.ledger.clone(), self.context.clock.clone());
        let seller = Arc::new(Seller::new(sale, gate, ledger, clock, recording, losses, announces));
        let retrying = seller.clone();
        let retrying = AbortOnDropHandle::new(tokio::spawn(async move { retrying.retry_suspects().await }));
        let max_batch = max_batch.min(MAX_ADMITTED_AT_ONCE);
        // A request whose caller has gone has had no effect yet, so it is dropped. One batch at a time: with two, every other batch has a
        // single order, because it begins as soon as the first buyer of the last batch is back.
        let options = Options { max_batch, queue, in_flight: 1, abandoned: Abandoned::Drop };
        let permits = self.permits.clone();
        let batcher = match self.delivery.queue() {
            None => Batcher::new(SellerHandle(seller.clone()), options, permits),
            Some(queue) => {
                let (shield, broker) = (self.shield.clone(), self.broker.clone());
                let admitter = Admitter::new(sale, seller.clone(), queue.accept_within, shield, broker);
                Batcher::new(admitter, options, permits)
            }
        };
        SaleQueue { seller, batcher, retrying }
    }

    pub(super) async fn submit(&self, sale: SaleId, job: Job) -> Result<Answer, Error> {
        let ticket = self.with_queue(sale, |queue| queue.batcher.submit(job))??;
        Ok(ticket.await.map_err(|_| Error::OutcomeUnknown)??)
    }
}
