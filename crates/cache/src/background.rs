//! What goes on when its caller has its answer, and can be waited for before the process ends.

use std::sync::Arc;

use tokio::sync::watch;

#[derive(Debug, Clone)]
pub(crate) struct Background {
    under_way: Arc<watch::Sender<usize>>,
}

/// Counts until it is dropped, however the work ends.
#[derive(Debug)]
pub(crate) struct Counted(Arc<watch::Sender<usize>>);

impl Background {
    pub(crate) fn new() -> Self {
        Self { under_way: Arc::new(watch::Sender::new(0)) }
    }

    pub(crate) fn count(&self) -> Counted {
        self.under_way.send_modify(|under_way| *under_way += 1);
        Counted(self.under_way.clone())
    }

    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let counted = self.count();
        tokio::spawn(async move {
            work.await;
            drop(counted);
        });
    }

    /// Waits until nothing is under way.
    pub(crate) async fn settled(&self) {
        // We hold the sender: it is not closed.
        let _ = self.under_way.subscribe().wait_for(|under_way| *under_way == 0).await;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|under_way| *under_way -= 1);
    }
}
