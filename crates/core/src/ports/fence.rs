//! Scheduled work that one process at a time may do.

/// Proof that a process holds the lock of scheduled work: a number that is higher for every later holder. The ledger refuses a lower one
/// than it has seen, so a process that has lost the lock without noticing changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence {
    pub work: ScheduledWork,
    pub token: u64,
}

/// The work that is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduledWork {
    /// Copying the orders of old sales into the index by user.
    IndexOrders,
    /// Deleting expired sessions and login codes.
    DeleteExpired,
    /// Comparing gate and ledger, and repairing what differs.
    Reconcile,
    /// Cancelling orders that were not paid in time.
    ExpireOrders,
    /// Sending the steps of orders to a receiver of the operator.
    DeliverEvents,
}

impl ScheduledWork {
    /// Whether any number of processes may do it at the same time. Then its lock only avoids double work, and the ledger checks no token.
    pub const fn is_safe_at_once(self) -> bool {
        matches!(self, Self::ExpireOrders | Self::DeliverEvents)
    }

    /// The name of the lock, and in the ledger.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::IndexOrders => "index_orders",
            Self::DeleteExpired => "delete_expired",
            Self::Reconcile => "reconcile",
            Self::ExpireOrders => "expire_orders",
            Self::DeliverEvents => "deliver_events",
        }
    }
}

/// The result of fenced work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fenced<T> {
    Done(T),
    /// A process with a higher token has worked since. Nothing was changed.
    Superseded,
}

impl<T> Fenced<T> {
    /// The result, if the work was done.
    pub fn done(self) -> Option<T> {
        match self {
            Self::Done(result) => Some(result),
            Self::Superseded => None,
        }
    }
}
