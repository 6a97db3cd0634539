//! Connects gate, ledger and catalogue into a tier and runs its workers.
//!
//! - [`Engine`] (`engine`): starts a tier, holds its parts, shuts down
//! - `buy`: a request to buy, from the guard of its buyer to the answer
//! - `tier`: how an order gets to the ledger; `tier/solo`: gate in this process; `tier/redis`: gate in Redis, for `shared` and what is built on it; `tier/queued`: and a queue; `tier/shielded`: and a shield
//! - `batcher`: batches requests, without a timer; `recording`: records a batch until the outcome of each order is known; `ledger_breaker`: whether the ledger answers
//! - `sales`, `shops`, `orders`, `quarantine`, `dead_letters`: the other requests; `reduction`: the second step of taking stock away; `edits`: noting that the gate has an edit; `sale_index`, `catalogue_cache`: what they read
//! - `order_changes`: waiting for the next step of an order; `payments`: paying orders; `readmission`: new orders for late payments; `redemption`: redeeming them; `events`: their steps for a receiver of the operator
//! - `login`: login by code; `auth`: sessions and accounts; `sessions`: the cache of sessions; `shared_sessions`: sessions in Redis; `token`: the token of a session
//! - `send_budget`: how many login codes may be sent; `proof_of_work`: the puzzle before a code
//! - `ids`: snowflakes, or numbers of a counter in Redis
//! - `audit`: the log of what administrators did; `reconcile`: comparing gate and ledger; `alerts`: cases that need a person
//! - `retention`: how long a sale that is over stays in the gate; `without_order`: who has none in a sale that has left it; `workers`: tasks that run beside the requests; `scheduled`: which node
//!   does work that one node at a time does; `failpoints`: those in asynchronous code

mod alerts;
mod audit;
mod auth;
mod batcher;
mod buy;
mod catalogue_cache;
mod dead_letters;
mod edits;
mod engine;
mod error;
mod events;
mod failpoints;
mod ids;
mod ledger_breaker;
mod login;
mod order_changes;
mod orders;
mod payments;
mod proof_of_work;
mod quarantine;
mod readmission;
mod reconcile;
mod recording;
mod redemption;
mod reduction;
mod retention;
mod sale_index;
mod sales;
mod scheduled;
mod send_budget;
mod sessions;
mod shared_sessions;
mod shops;
mod tier;
mod token;
mod without_order;
mod workers;

pub use alerts::{Alert, AlertConfig, AlertKind, AlertSender};
pub use audit::{Action, AuditOutcome, AuditRecord, Caller, Change, Outcome};
pub use auth::{AuthConfig, VerifiedToken};
pub use buy::Bought;
pub use catalogue_cache::CacheConfig;
pub use engine::{Config, Engine, Ready, StartError};
pub use error::Error;
pub use events::{EventConfig, EventError, EventSender};
pub use ids::IdConfig;
pub use login::{CodeSent, LoggedIn, Sender};
pub use order_changes::OrderFollower;
pub use orders::{OrderRecord, OrderView, OrderWatch};
pub use payments::{LatePayments, PaymentConfig, PaymentProvider};
pub use proof_of_work::{Puzzle, Solution};
pub use reconcile::{ReconcileReport, Reconciled};
pub use sales::SaleView;
pub use send_budget::SendBudgets;
pub use stampede_queue::{DeadLetter, DeadLetterId};
pub use tier::{
    AnswerAfter, QueueConfig, QueuedConfig, RabbitMqConfig, ReconcileConfig, RedisTierConfig, ShieldConfig, SoloConfig,
    StreamConfig, TierConfig, Transport,
};
pub use token::SessionKeys;
