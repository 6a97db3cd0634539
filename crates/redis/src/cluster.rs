//! Commands to a cluster.
//!
//! The redis crate sends a command again when its connection breaks, although the command may have been executed; the second reply then
//! describes the effect of the first execution. Its retries are therefore disabled. A command that a node *refused to execute* (the slot
//! is on another node or is being migrated, the node is not ready) is sent again from here, until the response timeout.

use std::time::Duration;

use redis::aio::ConnectionLike as _;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, SingleNodeRoutingInfo, SlotAddr};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::error::{CommandError, ErrorClass, timeout_error};

const INITIAL_DELAY: Duration = Duration::from_millis(5);
const MAX_DELAY: Duration = Duration::from_millis(100);
const NO_COMMAND: (ErrorKind, &str) = (ErrorKind::Client, "no command");

/// Sends a command and returns its reply.
pub(crate) async fn send(
    connection: &ClusterConnection,
    command: &Cmd,
    response_timeout: Duration,
) -> Result<Value, CommandError> {
    let replies = send_all(connection, &[command], None, response_timeout).await?;
    replies.into_iter().next().ok_or_else(missing_replies)
}

/// Sends a command that writes `key`, then another one over the same connection; returns both replies.
pub(crate) async fn send_both(
    connection: &ClusterConnection,
    commands: [&Cmd; 2],
    key: &[u8],
    response_timeout: Duration,
) -> Result<[Value; 2], CommandError> {
    let replies = send_all(connection, &commands, Some(key), response_timeout).await?;
    let [first, second] = <[Value; 2]>::try_from(replies).map_err(|_| missing_replies())?;
    // The first command has been executed, so an error of the second leaves the outcome of both unknown.
    Ok([first, second.extract_error().map_err(CommandError::Unknown)?])
}

/// Host and port of the node that a slot is migrating to.
type AskTarget = (String, u16);

/// Sends the commands until a node executes them. The first reply is never an error reply.
async fn send_all(
    connection: &ClusterConnection,
    commands: &[&Cmd],
    key: Option<&[u8]>,
    response_timeout: Duration,
) -> Result<Vec<Value>, CommandError> {
    let deadline = Instant::now() + response_timeout;
    let mut backoff = Backoff::new(INITIAL_DELAY, MAX_DELAY);
    let mut ask = None;
    loop {
        let sent = tokio::time::timeout_at(deadline, send_once(connection, commands, key, ask.take())).await;
        let error = match sent.unwrap_or_else(|_| Err(timeout_error())) {
            Ok(replies) => return Ok(replies),
            Err(error) => error,
        };
        let class = ErrorClass::of(&error);
        if !matches!(class, ErrorClass::Transient) || Instant::now() + backoff.current() >= deadline {
            return Err(class.with(error));
        }
        ask = ask_target(&error);
        if ask.is_none() {
            backoff.sleep().await;
        }
    }
}

/// Sends the commands in one write, so that nothing comes between `ASKING` and its command, or between a write and its `WAIT`.
async fn send_once(
    connection: &ClusterConnection,
    commands: &[&Cmd],
    key: Option<&[u8]>,
    ask: Option<AskTarget>,
) -> RedisResult<Vec<Value>> {
    let mut connection = connection.clone();
    let asking = usize::from(ask.is_some());
    let route = match (ask, key) {
        (Some((host, port)), _) => SingleNodeRoutingInfo::ByAddress { host, port },
        (None, Some(key)) => SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master)),
        (None, None) => {
            let command = commands.first().copied().ok_or_else(|| RedisError::from(NO_COMMAND))?;
            return Ok(vec![connection.req_packed_command(command).await?.extract_error()?]);
        }
    };
    let mut pipe = redis::pipe();
    if asking == 1 {
        pipe.cmd("ASKING");
    }
    for command in commands {
        pipe.add_command((*command).clone());
    }
    let mut replies = connection.route_pipeline(pipe, asking, commands.len(), route).await?;
    if let Some(first) = replies.first_mut() {
        *first = std::mem::replace(first, Value::Nil).extract_error()?;
    }
    Ok(replies)
}

fn ask_target(error: &RedisError) -> Option<AskTarget> {
    if error.kind() != ErrorKind::Server(ServerErrorKind::Ask) {
        return None;
    }
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

fn missing_replies() -> CommandError {
    CommandError::Unknown((ErrorKind::Client, "fewer replies than commands").into())
}
