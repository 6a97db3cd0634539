//! Puts a tier together and owns its workers. The only crate that knows tiers.
//!
//! - [`engine`]: starts a tier, holds its parts, settles everything at shutdown
//! - [`solo`]: the buying path: keyed guard → gate → group commit → answer
//! - [`batcher`]: the natural batcher, used at every hop
//! - [`commit`]: what stands behind the batcher: a batch into the ledger, and the gate brought in line
//! - `recording`: records until the outcome is known; halving, quarantine
//! - [`sales`], [`shops`], [`orders`]: what else the edge may ask for
//! - [`login`]: login by code; [`people`]: sessions and accounts
//! - [`send_budget`]: how many login codes may be sent; [`proof_of_work`]: the puzzle before a code
//! - [`audit`]: what administrators did; `quarantine`: what they do with orders that cannot be recorded
//! - `reads`: what visitors read of shops and vouchers, cached
//! - `sessions`: who is logged in, in memory
//! - [`token`]: the token of a session, checked without any store
//! - `task`: tasks that end with their owner
//! - `workers`: what runs beside the requests

pub mod audit;
pub mod auth;
pub mod batcher;
mod catalogue_cache;
pub mod commit;
pub mod engine;
pub mod error;
pub mod login;
pub mod orders;
pub mod proof_of_work;
mod quarantine;
mod recording;
pub mod sales;
pub mod send_budget;
mod sessions;
pub mod shops;
pub mod solo;
mod task;
pub mod token;
mod workers;

pub use audit::{Action, AuditRecord, Caller, Change, Outcome};
pub use auth::{AuthConfig, Proven};
pub use engine::{Config, Engine, StartError};
pub use error::Error;
pub use login::{CodeSent, LoggedIn, Sender};
pub use proof_of_work::{Puzzle, Solution};
pub use sales::SaleView;
pub use send_budget::SendBudgets;
pub use solo::Bought;
pub use token::SessionKeys;
