//! Killing a node in the middle of its work.
//!
//! A node is a value with its background task. Killing it aborts the task where it is and drops the value with all that is in its
//! memory; so does dropping it, after an error. Connections of its own close with it: those to RabbitMQ, and those to Redis for blocking
//! commands and subscriptions. The pool of MariaDB and the shared connection to Redis belong to the site and stay open. A task is killed at a
//! [`KillPoint`], where it waits for no answer.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::error::{Error, Result};

/// How long a node may take to reach the point where it is killed.
const LIMIT: Duration = Duration::from_secs(20);

/// The point at which a node is killed. A task that reaches it for the n-th time stays there.
#[derive(Debug, Clone)]
pub struct KillPoint {
    /// How often it will be passed, with the one that does not return.
    left: Arc<watch::Sender<Option<u64>>>,
}

impl KillPoint {
    /// Stops the task that reaches it for the `n`-th time, counted from one.
    pub fn at(n: u64) -> Self {
        Self { left: Arc::new(watch::Sender::new(Some(n))) }
    }

    /// Stops nothing.
    pub fn never() -> Self {
        Self { left: Arc::new(watch::Sender::new(None)) }
    }

    /// Called by a version where a crash hurts.
    pub async fn pass(&self) {
        let mut stop = false;
        self.left.send_modify(|left| {
            if let Some(left) = left {
                stop = *left == 1;
                *left = left.saturating_sub(1);
            }
        });
        if stop {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the task has stopped there.
    ///
    /// # Errors
    /// If that takes too long.
    pub async fn reached(&self) -> Result<()> {
        let mut left = self.left.subscribe();
        let reached = left.wait_for(|left| *left == Some(0));
        let reached = tokio::time::timeout(LIMIT, reached).await;
        reached.map(drop).map_err(|_| Error::TimedOut("the node reaches the point where it is killed"))
    }
}

/// A node that is being run.
#[derive(Debug)]
pub struct Node<S> {
    pub shop: Arc<S>,
    /// One task, which ends with this value. It would take orders from the queue of the next run otherwise.
    worker: JoinSet<Result<()>>,
}

impl<S> Node<S> {
    /// Starts the work of a node.
    pub fn start(shop: Arc<S>, work: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        let mut worker = JoinSet::new();
        worker.spawn(work);
        Self { shop, worker }
    }

    /// Aborts the worker, waits for its end, and drops what is in memory.
    pub async fn kill(mut self) {
        self.worker.shutdown().await;
        drop(self.shop);
    }

    /// Checks that the worker has not ended.
    ///
    /// # Errors
    /// The error with which it has ended.
    pub fn check(&mut self) -> Result<()> {
        let Some(ended) = self.worker.try_join_next() else { return Ok(()) };
        ended.map_err(|error| Error::Failed(error.to_string()))??;
        Err(Error::Failed("the worker has ended".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_worker_ends_with_its_node() {
        let held = Arc::new(());
        let work = |held: Arc<()>| async move {
            std::future::pending::<()>().await;
            drop(held);
            Ok::<_, Error>(())
        };
        let mut node = Node::start(Arc::new(()), work(held.clone()));
        node.check().unwrap();
        node.kill().await;
        assert_eq!(Arc::strong_count(&held), 1, "it has ended once the node is killed");

        drop(Node::start(Arc::new(()), work(held.clone())));
        let ended = async {
            while Arc::strong_count(&held) > 1 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), ended).await.expect("it ends after the node is dropped");
    }

    #[tokio::test]
    async fn a_worker_that_has_ended_is_noticed() {
        let mut node = Node::start(Arc::new(()), async { Err(Error::TimedOut("the work")) });
        let ended = async {
            loop {
                if let Err(error) = node.check() {
                    return error.to_string();
                }
                tokio::task::yield_now().await;
            }
        };
        let error = tokio::time::timeout(Duration::from_secs(10), ended).await.expect("its end is noticed");
        assert_eq!(error, "timed out: the work");
    }
}
