//! Puts a tier together and owns its workers. The only crate that knows tiers.
//!
//! - [`engine`]: starts a tier, holds its parts, settles everything at shutdown
//! - [`solo`]: the buying path: keyed guard → gate → group commit → answer
//! - [`batcher`]: the natural batcher, used at every hop
//! - [`commit`]: what stands behind the batcher: a batch into the ledger, and the gate brought in line
//! - `recording`: records until the outcome is known; halving, quarantine
//! - [`sales`], [`shops`], [`orders`], [`people`]: what else the edge may ask for
//! - [`audit`]: what administrators did; `quarantine`: what they do with orders that cannot be recorded
//! - `reads`: what visitors read of shops and vouchers, cached
//! - `sessions`: who is logged in, in memory
//! - `token`: the token of a session, checked without any store
//! - `task`: tasks that end with their owner
//! - `workers`: what runs beside the requests

pub mod audit;
pub mod batcher;
pub mod commit;
pub mod engine;
pub mod error;
pub mod orders;
pub mod people;
mod quarantine;
mod reads;
mod recording;
pub mod sales;
mod sessions;
pub mod shops;
pub mod solo;
mod task;
mod token;
mod workers;

pub use audit::{Action, AuditRecord, Caller, Change, Outcome};
pub use engine::{Config, Engine, StartError};
pub use error::Error;
pub use people::{CodeSent, LoggedIn, PeopleConfig, Sender};
pub use sales::SaleView;
pub use solo::Bought;
