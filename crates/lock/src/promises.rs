//! What each lock promises, and what not.
//!
//! # A lease is not mutual exclusion
//!
//! A lock on a server across a network cannot be held for ever, because its holder may die; so it is held for a time, the lease. A
//! holder that stands still for longer than its lease (a paused process, a long collection of garbage, a machine that sleeps) does not
//! know that it has lost the lock, and goes on. No lock of this kind, by whomever it is made, can prevent that. What this crate does:
//!
//! - a lock without a lease of its own is renewed as long as its guard lives ([`Config::watchdog_lease`](crate::Config::watchdog_lease));
//! - [`Guard::lost`](crate::Guard::lost) ends *before* anybody else can have the lock, as long as the process runs and clocks go at
//!   about the same speed: the lease is counted from before the command was sent, less one per cent and two milliseconds;
//! - the **fencing token** settles the rest. Every new holder gets a higher one; send it with every write, and let what is written to
//!   refuse a lower one than it has seen.
//!
//! If two at once would be *wasteful*, a lock is enough. If two at once would be *wrong*, and you cannot be sure that your process
//! never stands still, use the token, or a condition in the database that refuses the second.
//!
//! ```
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = stampede_testkit::redis::start()?;
//! # let url = stampede_testkit::redis::url(server.port());
//! use std::time::Duration;
//! use stampede_lock::{Config, Locks, Owner};
//!
//! /// What is written to: it knows the highest token that it has seen.
//! #[derive(Default)]
//! struct Fenced { seen: u64, value: &'static str }
//!
//! impl Fenced {
//!     fn write(&mut self, fence: Option<u64>, value: &'static str) -> bool {
//!         match fence {
//!             Some(fence) if fence >= self.seen => { self.seen = fence; self.value = value; true }
//!             _ => false,
//!         }
//!     }
//! }
//!
//! let locks = Locks::connect(url, Config::default()).await?;
//! let lock = || locks.reentrant("value", &Owner::new());
//! let mut resource = Fenced::default();
//!
//! let stale = lock()?.with_lease(Duration::from_millis(50))?.lock().await?;
//! stale.lost().await; // it sleeps for too long …
//! let holder = lock()?.lock().await?; // … and somebody else gets the lock.
//! assert!(resource.write(holder.fence(), "the holder's"));
//! assert!(!resource.write(stale.fence(), "the stale one's"), "refused");
//! assert_eq!(resource.value, "the holder's");
//! # drop(stale); holder.release().await?;
//! # Ok(()) }
//! ```
//!
//! # The kinds
//!
//! | | for whom | enter again | order | token | one server | replicas, sentinel | cluster |
//! |---|---|---|---|---|---|---|---|
//! | [simple](crate::Locks::simple) | one | no | any | no | yes | yes ¹ | yes ¹ |
//! | [re-entrant](crate::Locks::reentrant) | one | yes | any | yes | yes | yes ¹ | yes ¹ |
//! | [fair](crate::Locks::fair) | one | yes | arrival | yes | yes | yes ¹ | yes ¹ |
//! | [read-write](crate::Locks::read_write) | many readers or one writer | yes; from writing to reading | any ² | yes | yes | yes ¹ | yes ¹ |
//! | [`Multi`](crate::Multi) | one | if its locks are | any | each its own | yes | yes ³ | yes ¹ |
//! | [`Red`](crate::Red) | one | no | any | no ⁴ | no: three or more | each may have replicas | no ⁵ |
//!
//! ¹ Redis tells its replicas what it did *after* it has answered. If a master dies before, the replica that takes its place does not know
//! of the lock, and gives it to another: see [below](#when-a-master-is-replaced). Tokens still rise, as long as the clocks of master and
//! replica do not differ by more than the time the change took.
//!
//! ² Readers that keep coming can keep a writer waiting for ever.
//!
//! ³ With its locks on different masters: whoever has all of them still has the others when one master forgets, so a second cannot have
//! all. With all of them on one, as ¹.
//!
//! ⁴ The clocks of independent servers differ, so the highest of their tokens need not rise.
//!
//! ⁵ The nodes of a cluster hold different keys: no two of them know the same lock. Use several clusters or servers.
//!
//! One name is for one kind: a simple and a re-entrant lock of the same name get in each other's way with an error, but a re-entrant one
//! does not see the readers of a read-write lock.
//!
//! # When a master is replaced
//!
//! A second may hold a lock that the new master does not know of. For how long depends on whether the first still reaches the *old* master:
//!
//! - if it does not, it is told with its next renewal, which goes to the new master (a third of the lease), or when its lease ends;
//! - **if it does** (a partition with the first and the old master on one side), its renewals go on there, and **both hold the lock for as
//!   long as that lasts**. Nothing in the lock ends it.
//!
//! What to do about it, from the weaker to the stronger:
//!
//! - **`min-replicas-to-write 1`** on the servers, with a `min-replicas-max-lag` shorter than the lease (it is 10 s, the lease 30 s): an old
//!   master that has lost its replicas refuses every write after that lag, so its holders are told when their leases end. Recommended
//!   wherever there are replicas. What was acquired in the last moments before can still be unknown to the new master.
//! - **[`Config::replicas`](crate::Config::replicas)**: so many replicas must confirm every acquire and every renewal (`WAIT`); without, an
//!   acquire fails with [`Error::NotReplicated`](crate::Error::NotReplicated) and a renewal does not count. With all replicas confirming,
//!   whichever takes over knows of every lock that was given, so nobody else gets it before its lease ends; and by then a holder at the old
//!   master knows. With fewer, one that did not confirm may take over.
//! - a [`Red`](crate::Red) lock or a [`Multi`](crate::Multi) lock over independent masters (³), or the fencing token.
//!
//! # When a server of a red lock forgets
//!
//! The watchdog acquires it again there, as long as most of the others hold it, and have held it all the while since that server was last
//! seen to. So servers may be restarted empty one after another, with at least a renewal interval (a third of the lease) between the return
//! of one and the end of the next. Two of three within that time lose the lock, and [`lost`](crate::RedGuard::lost) says so with the next
//! renewal; it stays lost. A red lock with a lease of its own is neither renewed nor mended.
//!
//! # Which Redis
//!
//! **Redis 6.2 or later** (`ZADD … GT` in the read lock); tested with 7.0. Scripts, `PUBLISH` and `SUBSCRIBE` must be allowed, and `WAIT` for
//! [`Config::replicas`](crate::Config::replicas). A policy that evicts keys must not reach the locks' keys: use `noeviction` or one that
//! spares keys with an expiry.
//!
//! # When something breaks
//!
//! | | what happens |
//! |---|---|
//! | the holder's process dies | the lock is free when its lease ends |
//! | the holder is cut off | [`lost`](crate::Guard::lost) ends before the lease does; nobody else has the lock before |
//! | an answer is lost | an acquire is *unknown*: whoever waits tries again under the same id and finds out; whoever does not gets [`Error::Unreachable`](crate::Error::Unreachable), and what may have been acquired is released in the background |
//! | Redis stands still | calls fail after [`answer_within`](crate::Config::answer_within), or when their own wait is over; what it does afterwards with commands that nobody waits for any more is cleared up, at the latest by the lease |
//! | Redis restarts with its data | the lock stays, if the restart was quicker than the lease |
//! | Redis restarts empty | the lock is lost, and its holder is told with the next renewal; tokens go on rising, because none is below Redis' clock in microseconds |
//! | Redis' clock jumps ahead | leases end early, without notice before the next renewal |
//! | Redis' clock goes back | tokens go on rising for [`fence_memory`](crate::Config::fence_memory) |
//! | a command to a cluster gets no answer | it is not sent again unless the node refused to carry it out; a release is repeated under its id, and one that was carried out unanswered is not taken for a lost lock |
//! | the program ends | dropped guards are released before [`Locks::close`](crate::Locks::close) returns; without it their leases end them |
//! | a waiter dies | nobody waits for it; in line for a fair lock it is passed over when its place has had no sign of life for a lease |
//! | a message is lost | the waiter looks again when the lease that it was told of ends |
//!
//! # What is bounded
//!
//! Of the waiters of one client for one lock, one looks at a time: an acquisition costs about two scripts, however many wait (for the next
//! holder in each *other* client that waits, one more). One connection, one subscription (while somebody waits) and one watchdog for each [`Locks`](crate::Locks). A lock leaves nothing in
//! Redis when it is released but its last token, for a day. Abandoned holds are cleared up with patience by at most 16,384 tasks at
//! once; more get one try each, and are left to their leases after that. Waiting is bounded by whoever waits: [`lock`](crate::Lock::lock) waits for ever.
