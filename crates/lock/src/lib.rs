//! Locks that stand on their own and know nothing of what they guard.
//!
//! Inside one process:
//!
//! - [`keyed`]: an asynchronous mutex per key
//!
//! On Redis, for many processes ([`Locks`] makes them):
//!
//! - [`Locks::simple`], [`Locks::reentrant`], [`Locks::fair`], [`Locks::read_write`]: a [`Lock`] each, which gives a [`Guard`]
//! - [`Multi`]: all of several locks or none; [`Red`]: the majority of several servers
//! - [`Owner`]: who may enter again
//! - [`promises`]: what each of them promises, and what not
//!
//! How it works inside, from the outside in: `lock` tries and waits, `told` is the subscription that wakes those who wait, `guard` and
//! `hold` are what is in hand, `quorum` is most of a red lock's holds, `watchdog` renews, `client` puts them together and says what is in Redis, `scripts` are the
//! scripts in `lua/`. The connection is `stampede-redis`.

#![warn(missing_docs)]

mod client;
mod error;
mod guard;
mod hold;
pub mod keyed;
mod lock;
mod multi;
mod owner;
pub mod promises;
mod quorum;
mod red;
mod scripts;
mod told;
mod watchdog;

pub use client::{Config, Locks, ReadWrite};
pub use error::{Error, Result};
pub use guard::Guard;
pub use keyed::Keyed;
pub use lock::Lock;
pub use multi::{Multi, MultiGuard};
pub use owner::Owner;
pub use red::{Red, RedGuard};
pub use stampede_redis::Servers;
