//! Killing a node in the middle of its work.
//!
//! A node is a value with its background task. Killing it aborts the task where it is and drops the value with all that is in its
//! memory, and its connections break: the servers see what they see when a process gets SIGKILL.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

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
    worker: JoinHandle<Result<()>>,
}

impl<S> Node<S> {
    pub const fn new(shop: Arc<S>, worker: JoinHandle<Result<()>>) -> Self {
        Self { shop, worker }
    }

    /// Aborts the worker and drops what is in memory.
    pub async fn kill(self) {
        self.worker.abort();
        // The result is that it was cancelled.
        let _ = self.worker.await;
        drop(self.shop);
    }

    /// The error with which the worker has ended, if it has.
    ///
    /// # Errors
    /// That error.
    pub async fn check(&mut self) -> Result<()> {
        if self.worker.is_finished() {
            let ended = (&mut self.worker).await.map_err(|error| Error::Failed(error.to_string()))?;
            ended?;
            return Err(Error::Failed("the worker has ended".to_owned()));
        }
        Ok(())
    }
}
