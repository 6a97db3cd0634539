//! Batches requests without a timer: takes **everything that waits**, makes one call, distributes the answers, and repeats.
//!
//! There is no timer and no artificial delay: with one caller a batch is one request, and under load the batches grow.
//! Guarantees, whatever the backend does:
//!
//! - a request that was taken is given to the backend once, or (with [`Abandoned::Drop`]) not at all if its caller has gone;
//! - a caller gets at most one answer, and an error if the backend panics or returns the wrong number of answers;
//! - a batch belongs to a task, not to its callers: a call that was begun is finished even if every caller has gone;
//! - the queue is bounded, and so is the sum over batchers that share a semaphore; at a bound [`Batcher::submit`] returns the
//!   request at once.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use parking_lot::Mutex as SyncMutex;
use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

/// Carries out a batch.
pub trait Backend<Req>: Send + Sync + 'static {
    type Answer: Send + 'static;

    /// Returns one answer per request, in their order.
    fn call(&self, batch: &[Req]) -> impl Future<Output = Vec<Self::Answer>> + Send;

    /// For a backend that carries out one call at a time: waits until it is free, and returns a guard that is held for the call.
    /// With two tasks (`in_flight`) the next call begins while the answers of the last are distributed, and takes everything
    /// that was submitted until then.
    fn acquire(&self) -> impl Future<Output = Option<OwnedMutexGuard<()>>> + Send {
        async { None }
    }
}

impl<Req: Sync, B: Backend<Req>> Backend<Req> for Arc<B> {
    type Answer = B::Answer;

    fn call(&self, batch: &[Req]) -> impl Future<Output = Vec<B::Answer>> + Send {
        B::call(self, batch)
    }

    fn acquire(&self) -> impl Future<Output = Option<OwnedMutexGuard<()>>> + Send {
        B::acquire(self)
    }
}

/// What to do with a request whose caller has gone before it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// Drop it: nothing depends on it.
    Drop,
    /// Carry it out: something has happened that depends on it, such as a mark in the gate.
    Keep,
}

#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The most requests in one call.
    pub max_batch: usize,
    /// The most requests that wait in this queue.
    pub queue: usize,
    /// How many calls may be under way at once.
    pub in_flight: usize,
    pub abandoned: Abandoned,
}

/// A bound is reached. Returns the request; nothing was done with it.
#[derive(Debug, PartialEq, Eq)]
pub struct Full<Req>(pub Req);

/// The backend failed on the batch: the outcome of the request is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the batch was not answered")]
pub struct Unanswered;

struct Item<Req, Ans> {
    request: Req,
    reply: oneshot::Sender<Ans>,
    /// Counts against the shared bound until the answer is sent.
    _permit: OwnedSemaphorePermit,
}

/// A queue and the tasks that serve it. After it is dropped, the tasks finish what was submitted.
pub struct Batcher<Req, Ans> {
    queue: mpsc::Sender<Item<Req, Ans>>,
    permits: Arc<Semaphore>,
    tasks: SyncMutex<Vec<JoinHandle<()>>>,
}

/// Waits for the answer. Dropping it does not cancel the request.
#[derive(Debug)]
pub struct Ticket<Ans>(oneshot::Receiver<Ans>);

impl<Ans> Future for Ticket<Ans> {
    type Output = Result<Ans, Unanswered>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| Unanswered)
    }
}

impl<Req: Send + Sync + 'static, Ans: Send + 'static> Batcher<Req, Ans> {
    /// Starts a batcher in front of `backend`. `permits` bounds the requests of all batchers that share it.
    pub fn new<B: Backend<Req, Answer = Ans>>(backend: B, options: Options, permits: Arc<Semaphore>) -> Self {
        let (queue, waiting) = mpsc::channel(options.queue);
        let (backend, waiting) = (Arc::new(backend), Arc::new(Mutex::new(waiting)));
        let tasks =
            (0..options.in_flight).map(|_| tokio::spawn(serve(backend.clone(), waiting.clone(), options))).collect();
        Self { queue, permits, tasks: SyncMutex::new(tasks) }
    }

    /// Submits a request, or returns it if a bound is reached.
    pub fn submit(&self, request: Req) -> Result<Ticket<Ans>, Full<Req>> {
        let Ok(permit) = self.permits.clone().try_acquire_owned() else { return Err(Full(request)) };
        let (reply, answer) = oneshot::channel();
        match self.queue.try_send(Item { request, reply, _permit: permit }) {
            Ok(()) => Ok(Ticket(answer)),
            Err(mpsc::error::TrySendError::Full(item) | mpsc::error::TrySendError::Closed(item)) => {
                Err(Full(item.request))
            }
        }
    }

    /// How many requests wait in the queue now.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.queue.max_capacity() - self.queue.capacity()
    }

    /// Takes no more requests, and returns when every request that was submitted is answered.
    pub async fn close(self) {
        let Self { queue, tasks, .. } = self;
        drop(queue);
        for task in tasks.into_inner() {
            if let Err(error) = task.await {
                tracing::error!(%error, "a batcher task failed");
            }
        }
    }
}

async fn serve<Req, Ans, B>(backend: Arc<B>, waiting: Arc<Mutex<mpsc::Receiver<Item<Req, Ans>>>>, options: Options)
where
    Req: Send + Sync + 'static,
    Ans: Send + 'static,
    B: Backend<Req, Answer = Ans>,
{
    let mut items = Vec::with_capacity(options.max_batch.min(1024));
    let mut requests = Vec::new();
    let mut replies = Vec::new();
    loop {
        let mut queue = waiting.lock().await;
        // Zero means that the queue is closed and empty.
        if queue.recv_many(&mut items, options.max_batch).await == 0 {
            break;
        }
        let guard = backend.acquire().await;
        while items.len() < options.max_batch
            && let Ok(item) = queue.try_recv()
        {
            items.push(item);
        }
        drop(queue);
        for Item { request, reply, _permit } in items.drain(..) {
            if options.abandoned == Abandoned::Keep || !reply.is_closed() {
                requests.push(request);
                replies.push((reply, _permit));
            }
        }
        if requests.is_empty() {
            continue;
        }
        let call = AssertUnwindSafe(async { backend.call(&requests).await }).catch_unwind();
        let called = call.await;
        drop(guard);
        match called {
            Ok(answers) if answers.len() == replies.len() => {
                for ((reply, _permit), answer) in replies.drain(..).zip(answers) {
                    // A caller that has gone does not receive its answer.
                    let _ = reply.send(answer);
                }
            }
            Ok(answers) => {
                tracing::error!(
                    requests = replies.len(),
                    answers = answers.len(),
                    "a backend returned the wrong number of answers"
                );
            }
            Err(_) => tracing::error!(requests = replies.len(), "a backend panicked"),
        }
        // Requests without an answer get `Unanswered` when their senders are dropped.
        replies.clear();
        requests.clear();
    }
}

impl<Req, Ans> fmt::Debug for Batcher<Req, Ans> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batcher").field("queue", &self.queue).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
