//! Commands to a cluster.
//!
//! The client library sends a command again by itself when its connection breaks, although the command may have been carried out: the
//! second answer then describes the effect of the first. Its retries are off. A command that a node *refused to carry out* (its slot is
//! elsewhere or on the move, the node is not ready) is sent again from here, until the time for the answer is over.

use std::time::Duration;

use redis::aio::ConnectionLike as _;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, SingleNodeRoutingInfo, SlotAddr};
use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value};
use tokio::time::Instant;

use crate::link::{Failure, Said, too_late};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const NO_COMMAND: (ErrorKind, &str) = (ErrorKind::Client, "no command");

/// Sends a command and returns its answer.
pub(crate) async fn send(
    connection: &ClusterConnection,
    command: &Cmd,
    answer_within: Duration,
) -> Result<Value, Failure> {
    let values = send_all(connection, &[command], None, answer_within).await?;
    values.into_iter().next().ok_or_else(too_few)
}

/// Sends a command that writes `key`, and after it another on the same connection; returns both answers.
pub(crate) async fn send_both(
    connection: &ClusterConnection,
    commands: [&Cmd; 2],
    key: &[u8],
    answer_within: Duration,
) -> Result<[Value; 2], Failure> {
    let values = send_all(connection, &commands, Some(key), answer_within).await?;
    let [one, two] = <[Value; 2]>::try_from(values).map_err(|_| too_few())?;
    // The first has been carried out by now.
    Ok([one, two.extract_error().map_err(Failure::Unknown)?])
}

/// The node that a slot is moving to.
type Ask = (String, u16);

/// The first answer is not an error.
async fn send_all(
    connection: &ClusterConnection,
    commands: &[&Cmd],
    key: Option<&[u8]>,
    answer_within: Duration,
) -> Result<Vec<Value>, Failure> {
    let deadline = Instant::now() + answer_within;
    let mut pause = FIRST_PAUSE;
    let mut ask = None;
    loop {
        let answer = tokio::time::timeout_at(deadline, send_once(connection, commands, key, ask.take())).await;
        let error = match answer.unwrap_or_else(|_| Err(too_late())) {
            Ok(answers) => return Ok(answers),
            Err(error) => error,
        };
        let said = Said::of(&error);
        if !matches!(said, Said::NotNow) || Instant::now() + pause >= deadline {
            return Err(said.failure(error));
        }
        ask = asked(&error);
        if ask.is_none() {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// In one write, so that nothing comes between `ASKING` and what it is about, or between two that belong together.
async fn send_once(
    connection: &ClusterConnection,
    commands: &[&Cmd],
    key: Option<&[u8]>,
    ask: Option<Ask>,
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
    let mut pipeline = redis::pipe();
    if asking == 1 {
        pipeline.cmd("ASKING");
    }
    for command in commands {
        pipeline.add_command((*command).clone());
    }
    let mut values = connection.route_pipeline(pipeline, asking, commands.len(), route).await?;
    if let Some(first) = values.first_mut() {
        *first = std::mem::replace(first, Value::Nil).extract_error()?;
    }
    Ok(values)
}

fn asked(error: &RedisError) -> Option<Ask> {
    if error.kind() != ErrorKind::Server(ServerErrorKind::Ask) {
        return None;
    }
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

fn too_few() -> Failure {
    Failure::Unknown((ErrorKind::Client, "fewer answers than commands").into())
}
