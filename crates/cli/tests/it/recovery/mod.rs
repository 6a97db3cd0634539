//! Recovery in the tier `shared`: whatever Redis, nodes, the database and clocks do, no order is lost or sold twice, and selling goes on
//! without intervention. Every test ends with the invariants.
//!
//! - `drift`: differences between gate and ledger are repaired while sales run; `reconcile_command`: what operators see of that; `alerts`: alerts reach operators
//! - `memory`: Redis loses everything, a key, or the end of its file; `large_sale`: everything, with 100,000 orders; `damage`: another program writes to its keys; `replicas`: a replica that lags behind is promoted
//! - `redis_outage`, `database_outage`: a server is paused, cut off, killed, slow, or refuses writes; `herd`: Redis is away while a crowd waits; `clients`: a client is cut off
//! - `clocks`: the clocks of a node and of Redis are wrong
//! - `creation`, `edits`: a sale is created, or edited under load, and a node dies in between; `rebuilds`: rebuilds under load, also of nodes that die
//!   (`foreign_lock`: and while another client of the database locks sales); `left_orders`: orders that a node has left are recorded meanwhile;
//!   `absent_node`: a node with admitted orders misses a rebuild

mod absent_node;
mod alerts;
mod clients;
mod clocks;
mod creation;
mod damage;
mod database_outage;
mod drift;
mod edits;
pub mod foreign_lock;
mod herd;
mod large_sale;
mod left_orders;
mod memory;
pub mod rebuilds;
mod reconcile_command;
mod redis_outage;
pub mod replicas;

pub use rebuilds::{accept_orders, refuse_orders};

/// How many seeds a test of crashes has, over both databases.
const CRASHES: u64 = 50;
/// The same for outages, fail-overs and what else happens without a crash, on each database.
const OUTAGES: u64 = 5;

/// The seeds of a test: all of them in a soak, otherwise one.
fn seeds(all: u64) -> impl Iterator<Item = u64> {
    0..stampede_testkit::count(all, 1)
}
