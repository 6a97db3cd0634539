//! The natural batcher: takes **all that is waiting now**, makes one call, hands the answers out, and looks again.
//!
//! There is no timer and no artificial delay: with one caller a batch is one request, under load the batch grows by itself.
//! What the batcher promises, whatever the backend does:
//!
//! - a request that was taken is given to the backend once, or (with [`Abandoned::Drop`]) not at all if its caller has gone;
//! - a caller gets at most one answer, and an error if the backend panicked or answered wrongly: it never waits for ever;
//! - the batch belongs to a task, not to its callers: what was sent is settled even if every caller has gone;
//! - it is bounded, by its own queue and by a bound that it shares with others; at the bound [`Batcher::submit`] says so at once.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use tokio::sync::{Mutex, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;

/// Carries a batch out.
pub trait Backend<Req>: Send + Sync + 'static {
    type Answer: Send + 'static;

    /// One answer for each request, in their order.
    fn call(&self, batch: &[Req]) -> impl Future<Output = Vec<Self::Answer>> + Send;

    /// For a backend that does one call at a time: waits until it is free. With two tasks (`in_flight`) the next call then begins
    /// while the answers of the last are handed out, and takes what has come in until that moment.
    fn turn(&self) -> impl Future<Output = Option<OwnedMutexGuard<()>>> + Send {
        async { None }
    }
}

impl<Req: Sync, B: Backend<Req>> Backend<Req> for Arc<B> {
    type Answer = B::Answer;

    fn call(&self, batch: &[Req]) -> impl Future<Output = Vec<B::Answer>> + Send {
        B::call(self, batch)
    }

    fn turn(&self) -> impl Future<Output = Option<OwnedMutexGuard<()>>> + Send {
        B::turn(self)
    }
}

/// What to do with a request whose caller has gone before it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    /// Nobody waits for it and nothing has happened yet.
    Drop,
    /// Something has happened that must be settled.
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

/// A bound is reached. The request comes back; nothing was done with it.
#[derive(Debug, PartialEq, Eq)]
pub struct Full<Req>(pub Req);

/// The backend failed on the batch: what became of the request is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the batch was not answered")]
pub struct Unanswered;

struct Item<Req, Ans> {
    request: Req,
    reply: oneshot::Sender<Ans>,
    /// Its place under the shared bound, given back with the answer.
    _place: OwnedSemaphorePermit,
}

/// One queue and the task that serves it. Dropping it lets the task finish what was taken.
pub struct Batcher<Req, Ans> {
    queue: mpsc::Sender<Item<Req, Ans>>,
    places: Arc<Semaphore>,
    tasks: StdMutex<Vec<JoinHandle<()>>>,
}

/// Waits for the answer. Dropping it takes nothing back.
#[derive(Debug)]
pub struct Ticket<Ans>(oneshot::Receiver<Ans>);

impl<Ans> Future for Ticket<Ans> {
    type Output = Result<Ans, Unanswered>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| Unanswered)
    }
}

impl<Req: Send + Sync + 'static, Ans: Send + 'static> Batcher<Req, Ans> {
    /// Starts a batcher in front of `backend`. `places` is the bound that it shares with other batchers.
    pub fn new<B: Backend<Req, Answer = Ans>>(backend: B, options: Options, places: Arc<Semaphore>) -> Self {
        let (queue, waiting) = mpsc::channel(options.queue);
        let (backend, waiting) = (Arc::new(backend), Arc::new(Mutex::new(waiting)));
        let tasks =
            (0..options.in_flight).map(|_| tokio::spawn(serve(backend.clone(), waiting.clone(), options))).collect();
        Self { queue, places, tasks: StdMutex::new(tasks) }
    }

    /// Hands a request in. At a bound it comes straight back.
    pub fn submit(&self, request: Req) -> Result<Ticket<Ans>, Full<Req>> {
        let Ok(place) = self.places.clone().try_acquire_owned() else { return Err(Full(request)) };
        let (reply, answer) = oneshot::channel();
        match self.queue.try_send(Item { request, reply, _place: place }) {
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

    /// Takes no more, and returns when everything that was taken is settled.
    pub async fn close(self) {
        let Self { queue, tasks, .. } = self;
        drop(queue);
        for task in tasks.into_inner().unwrap_or_else(PoisonError::into_inner) {
            if let Err(error) = task.await {
                tracing::error!(%error, "a batcher's task did not end well");
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
        // Zero only once the queue is closed and empty.
        if queue.recv_many(&mut items, options.max_batch).await == 0 {
            break;
        }
        let turn = backend.turn().await;
        // All that is waiting now.
        while items.len() < options.max_batch
            && let Ok(item) = queue.try_recv()
        {
            items.push(item);
        }
        drop(queue);
        for Item { request, reply, _place } in items.drain(..) {
            if options.abandoned == Abandoned::Keep || !reply.is_closed() {
                requests.push(request);
                replies.push((reply, _place));
            }
        }
        if requests.is_empty() {
            continue;
        }
        let call = AssertUnwindSafe(async { backend.call(&requests).await }).catch_unwind();
        let called = call.await;
        drop(turn);
        match called {
            Ok(answers) if answers.len() == replies.len() => {
                for ((reply, _place), answer) in replies.drain(..).zip(answers) {
                    // A caller that has gone does not want its answer.
                    let _ = reply.send(answer);
                }
            }
            Ok(answers) => {
                tracing::error!(requests = replies.len(), answers = answers.len(), "a backend answered wrongly");
            }
            Err(_) => tracing::error!(requests = replies.len(), "a backend panicked"),
        }
        // Whoever has not been answered hears `Unanswered` now.
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
