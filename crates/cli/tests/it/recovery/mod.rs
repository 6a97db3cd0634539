//! Recovery in the tier `shared`: whatever Redis, nodes, the database and clocks do, no order is lost or sold twice, and selling goes on
//! without intervention. Every test ends with the invariants.
//!
//! - `drift`: differences between gate and ledger are repaired while sales run; `alerts`: alerts reach operators
//! - `memory`: Redis loses everything, a key, or the end of its file; `damage`: another program writes to its keys; `replicas`: a replica that lags behind is promoted
//! - `redis_outage`, `database_outage`: a server is paused, cut off, killed, slow; `clients`: a client is cut off
//! - `clocks`: the clocks of a node and of Redis are wrong
//! - `edits`: sales are edited under load, and a node dies in between; `rebuilds`: rebuilds under load, also of nodes that die

mod alerts;
mod clients;
mod clocks;
mod damage;
mod database_outage;
mod drift;
mod edits;
mod memory;
mod rebuilds;
mod redis_outage;
pub mod replicas;

/// How many seeds a test of crashes has, over both databases.
const CRASHES: u64 = 50;
/// The same for outages, fail-overs and what else happens without a crash, on each database.
const OUTAGES: u64 = 5;

/// The seeds of a test: all of them in a soak, otherwise one.
fn seeds(all: u64) -> impl Iterator<Item = u64> {
    0..stampede_testkit::count(all, 1)
}
