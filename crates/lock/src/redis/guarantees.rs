//! What each lock guarantees, and what it does not.
//!
//! # A lease is not mutual exclusion
//!
//! A lock on a server across a network cannot be held forever, because its holder may die. It is therefore held as a lease, which expires
//! after its TTL. A holder that is suspended for longer than the TTL (a stopped process, a long garbage collection pause, a sleeping
//! machine) does not notice that it has lost the lock, and continues. No lease-based lock can prevent that. This crate does the following:
//!
//! - A lock without a fixed TTL is renewed as long as its guard exists ([`Config::watchdog_ttl`](crate::Config::watchdog_ttl)).
//! - [`Guard::lost`](crate::Guard::lost) completes *before* another owner can acquire the lock, as long as the process runs and the clocks
//!   advance at about the same rate: validity is counted from before the command was sent, less one per cent and two milliseconds.
//! - The **fencing token** covers the remaining cases. Every new holder gets a higher one. Send it with every write, and let the resource
//!   refuse a token lower than the highest one it has seen.
//!
//! If two holders at once would be *wasteful*, a lock is enough. If two holders at once would be *wrong*, and the process may be suspended,
//! use the fencing token, or a constraint in the database that refuses the second write.
//!
//! ```
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = stampede_testkit::redis::start()?;
//! # let url = stampede_testkit::redis::url(server.port());
//! use std::time::Duration;
//! use stampede_lock::{Config, Locks, Owner};
//!
//! /// The protected resource. It remembers the highest token that it has seen.
//! #[derive(Default)]
//! struct Resource { highest_token: u64, value: &'static str }
//!
//! impl Resource {
//!     fn write(&mut self, token: Option<u64>, value: &'static str) -> bool {
//!         match token {
//!             Some(token) if token >= self.highest_token => { self.highest_token = token; self.value = value; true }
//!             _ => false,
//!         }
//!     }
//! }
//!
//! let locks = Locks::connect(url, Config::default()).await?;
//! let lock = || locks.reentrant("value", &Owner::new());
//! let mut resource = Resource::default();
//!
//! let stale = lock()?.with_ttl(Duration::from_millis(50))?.lock().await?;
//! stale.lost().await; // it is suspended until its lease has expired …
//! let current = lock()?.lock().await?; // … and another owner acquires the lock.
//! assert!(resource.write(current.fencing_token(), "current"));
//! assert!(!resource.write(stale.fencing_token(), "stale"), "refused");
//! assert_eq!(resource.value, "current");
//! # drop(stale); current.release().await?;
//! # Ok(()) }
//! ```
//!
//! # The kinds
//!
//! | | holders | re-entrant | order | fencing token | single server | replicas, Sentinel | cluster |
//! |---|---|---|---|---|---|---|---|
//! | [simple](crate::Locks::simple) | one | no | any | no | yes | yes ¹ | yes ¹ |
//! | [re-entrant](crate::Locks::reentrant) | one | yes | any | yes | yes | yes ¹ | yes ¹ |
//! | [fair](crate::Locks::fair) | one | yes | arrival | yes | yes | yes ¹ | yes ¹ |
//! | [read-write](crate::Locks::read_write) | many readers or one writer | yes; a writer may also read | any ² | yes | yes | yes ¹ | yes ¹ |
//! | [`MultiLock`](crate::MultiLock) | one | if its locks are | any | one per lock | yes | yes ³ | yes ¹ |
//! | [`RedLock`](crate::RedLock) | one | no | any | no ⁴ | no: three or more | each may have replicas | no ⁵ |
//!
//! ¹ Redis replicates a write *after* it has replied. If a master dies before that, the replica that takes its place does not have the
//! lock, and grants it to another owner: see [below](#when-a-master-is-replaced). Fencing tokens still increase, as long as the clocks of
//! master and replica do not differ by more than the duration of the failover.
//!
//! ² A steady stream of readers can keep a writer waiting forever.
//!
//! ³ With its locks on different masters: the holder of all of them still holds the others when one master loses its data, so a second
//! owner cannot acquire all. With all of them on one master, as ¹.
//!
//! ⁴ The clocks of independent servers differ, so the highest of their tokens need not increase.
//!
//! ⁵ The nodes of a cluster hold different keys, so no two of them have the same lock. Use several clusters or servers.
//!
//! A name must be used for one kind only: a simple and a re-entrant lock of the same name fail with an error, but a re-entrant lock does not
//! see the readers of a read-write lock.
//!
//! # When a master is replaced
//!
//! A second owner may acquire a lock that the new master does not have. For how long both hold it depends on whether the first still
//! reaches the *old* master:
//!
//! - If it does not, it learns that the lock is lost with its next renewal, which goes to the new master (after a third of the TTL), or when
//!   its lease expires.
//! - **If it does** (a network partition with the first owner and the old master on one side), its renewals succeed there, and **both hold
//!   the lock for as long as the partition lasts**. Nothing in the lock ends it.
//!
//! Countermeasures, from the weaker to the stronger:
//!
//! - **`min-replicas-to-write 1`** on the servers, with a `min-replicas-max-lag` shorter than the TTL (the defaults are 10 s and 30 s): an
//!   old master that has lost its replicas refuses every write after that lag, so its leases expire. Recommended wherever there are
//!   replicas. Locks acquired just before the failover may still be missing on the new master.
//! - **[`Config::replicas`](crate::Config::replicas)**: that many replicas must confirm every acquire and every renewal (`WAIT`). Otherwise
//!   an acquire fails with [`Error::NotReplicated`](crate::Error::NotReplicated), and a renewal does not count. If all replicas confirm,
//!   any of them that takes over has every granted lock, so no other owner acquires it before its lease expires; by then a holder at the
//!   old master knows. With fewer, a replica that did not confirm may take over.
//! - A [`RedLock`](crate::RedLock) or a [`MultiLock`](crate::MultiLock) over independent masters (³), or the fencing token.
//!
//! # When a server of a Redlock restarts empty
//!
//! The watchdog acquires the lock there again, as long as a majority of the other servers holds it, and has held it without interruption
//! since that server was last seen to hold it. Servers may therefore be restarted empty one after another, with at least a renewal interval
//! (a third of the TTL) between the return of one and the shutdown of the next. If two of three restart within that time, the lock is lost:
//! [`lost`](crate::RedLockGuard::lost) completes with the next renewal, and the lock stays lost. A Redlock with a fixed TTL is neither
//! renewed nor restored.
//!
//! # Redis versions and settings
//!
//! **Redis 6.2 or later** (`ZADD … GT` in the read lock); tested with 7.0. Scripts, `PUBLISH` and `SUBSCRIBE` must be allowed, and `WAIT`
//! for [`Config::replicas`](crate::Config::replicas). The eviction policy must not evict the keys of locks: use `noeviction`.
//!
//! # Failures
//!
//! | failure | effect |
//! |---|---|
//! | the holder's process dies | the lock is free when its lease expires |
//! | the holder is cut off from Redis | [`lost`](crate::Guard::lost) completes before the lease expires; no other owner acquires the lock before |
//! | a reply is lost | the outcome of the acquire is *unknown*: a waiting caller repeats it under the same id and learns the outcome; otherwise the call fails with [`Error::Unreachable`](crate::Error::Unreachable), and a lease that may exist is released in the background |
//! | Redis hangs | calls fail after [`response_timeout`](crate::Config::response_timeout), or when their own timeout ends; the effect of commands that it executes later is released, at the latest by the expiry of the lease |
//! | Redis restarts with its data | the lock stays, if the restart took less than the TTL |
//! | Redis restarts empty | the lock is lost, and its holder learns it with the next renewal; fencing tokens still increase, because none is below the clock of Redis in microseconds |
//! | the clock of Redis jumps ahead | leases expire early; the holder learns it with the next renewal |
//! | the clock of Redis goes back | fencing tokens still increase for [`fencing_token_ttl`](crate::Config::fencing_token_ttl) |
//! | a command to a cluster has no reply | it is sent again only if the node refused to execute it; a release is repeated under its id, and one that was executed without a reply is not reported as a lost lock, unless the lease had expired before |
//! | the program ends | locks of dropped guards are released before [`Locks::close`](crate::Locks::close) returns; without it they expire |
//! | a waiter dies | the others do not wait for it; in the queue of a fair lock it is skipped when its entry has not been renewed for the TTL |
//! | a message is lost | the waiter checks again when the lease of the current holder expires |
//!
//! # Resource limits
//!
//! Callers of one client that wait for a simple, re-entrant or write lock share their checks, so an acquisition costs about two scripts,
//! however many callers wait; every *other* client with waiters adds one more. Callers that wait for a read lock or a fair lock each check by
//! themselves. Each [`Locks`](crate::Locks) has one connection for commands (to a cluster, one per node), one more for messages while it has
//! waiters, and one watchdog. A released lock leaves nothing in Redis but its last fencing token, which a simple lock does not have, for
//! [`fencing_token_ttl`](crate::Config::fencing_token_ttl) (a day by default). At most 16,384 background releases are retried at once; further
//! ones get one attempt each, after which their leases expire. [`lock`](crate::Lock::lock) waits without a timeout.
