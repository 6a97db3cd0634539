//! The public API of the locks against real Redis servers.

mod cluster;
mod cluster_faults;
mod fair;
mod fencing_tokens;
mod keyed_mutex;
mod kinds;
mod multi_server;
mod mutual_exclusion;
mod outages;
mod read_write;
mod redlock_recovery;
mod reentrant;
mod replicas;
mod server_failures;
mod shutdown;
mod support;
mod thundering_herd;
mod tls;
mod waiting;
mod watchdog;
