//! File descriptors: raises the limit of open files and fits the number of connections into it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use stampede_http::ServerConfig;
use stampede_http::server::MAX_REFUSALS;

/// Descriptors that are not connections of clients: database, listeners, runtime, log, webhook.
const RESERVED: u64 = 96;
/// The minimum number of connections, however low the limit is.
const MIN_CONNECTIONS: usize = 16;

/// Raises the soft limit of open files to the hard limit and returns it, or `None` if there is none.
pub fn raise_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return limit.current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files");
            limit.current
        }
    }
}

/// Lowers the limits of connections to fit the limit of open files with this many listeners.
pub fn lower_connection_limits(server: &mut ServerConfig, limit: Option<u64>, listeners: usize) {
    let Some(limit) = limit else { return };
    let spare = usize::try_from(limit.saturating_sub(RESERVED)).unwrap_or(usize::MAX);
    let room = (spare / listeners).saturating_sub(MAX_REFUSALS).max(MIN_CONNECTIONS);
    let wanted = server.max_connections;
    if wanted <= room {
        return;
    }
    server.max_connections = room;
    // The limit per address is lowered in proportion, so that one address cannot take all connections.
    let share = server.max_connections_per_address.saturating_mul(room) / wanted;
    server.max_connections_per_address = share.clamp(1, room);
    tracing::warn!(
        limit,
        wanted,
        max_connections = server.max_connections,
        max_connections_per_address = server.max_connections_per_address,
        "http.max_connections is lowered: the limit of open files (ulimit -n) is too low"
    );
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn lowered(max: usize, per_address: usize, limit: Option<u64>, listeners: usize) -> (usize, usize) {
        let mut server = ServerConfig {
            tls: None,
            max_connections: max,
            max_connections_per_address: per_address,
            head_timeout: Duration::ZERO,
            drain_timeout: Duration::ZERO,
        };
        lower_connection_limits(&mut server, limit, listeners);
        (server.max_connections, server.max_connections_per_address)
    }

    #[test]
    fn connection_limits_are_lowered_to_fit_the_file_limit() {
        assert_eq!(lowered(10_000, 1_000, None, 1), (10_000, 1_000));
        assert_eq!(lowered(10_000, 1_000, Some(20_000), 1), (10_000, 1_000));
        assert_eq!(lowered(10_000, 1_000, Some(1_024), 1), (800, 80));
        assert_eq!(lowered(10_000, 1_000, Some(1_024), 2), (336, 33));
        assert_eq!(lowered(10_000, 1_000, Some(64), 1), (16, 1));
        assert_eq!(lowered(200_000, 200_000, Some(20_000), 1), (19_776, 19_776));
    }
}
