//! Automatic batching on one connection: commands that arrive while others are in flight are queued, and then sent together in one
//! write. A single caller never waits.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::error::{CommandError, is_connection_broken};

/// How many writes are in flight at once. With two, the next batch is written while the replies of the previous one are distributed.
const MAX_IN_FLIGHT: usize = 2;
/// The maximum number of commands in one write.
const MAX_BATCH: usize = 512;
/// The maximum number of queued commands. Beyond it a command is sent by itself and waits in the connection's own queue.
const MAX_QUEUED: usize = 65_536;

type Reply = Result<Value, CommandError>;

struct QueuedCommand {
    command: Cmd,
    reply: oneshot::Sender<Reply>,
}

enum Enqueued {
    /// The caller sends the command now.
    SendNow(Cmd),
    /// The command is sent in a later batch.
    Queued(oneshot::Receiver<Reply>),
}

#[derive(Default)]
struct State {
    in_flight: usize,
    queue: VecDeque<QueuedCommand>,
    /// Set once the connection is unusable.
    broken: Option<RedisError>,
}

pub(crate) struct Pipeline {
    connection: MultiplexedConnection,
    runtime: Handle,
    state: Mutex<State>,
}

impl Pipeline {
    pub(crate) fn new(connection: MultiplexedConnection) -> Arc<Self> {
        Arc::new(Self { connection, runtime: Handle::current(), state: Mutex::default() })
    }

    /// Sends a command, alone or in a batch. If the future is dropped while the command is queued, the command is not sent.
    pub(crate) async fn send(self: &Arc<Self>, command: Cmd) -> Reply {
        let command = match self.enqueue(command)? {
            Enqueued::SendNow(command) => command,
            Enqueued::Queued(reply) => {
                return reply.await.unwrap_or_else(|_| Err(CommandError::Unknown(connection_aborted())));
            }
        };
        let slot = InFlightSlot(self);
        let reply = self.connection.clone().req_packed_command(&command).await;
        if let Err(error) = &reply
            && is_connection_broken(error)
        {
            self.fail_queue(error);
        }
        drop(slot);
        reply.map_err(CommandError::from)
    }

    fn enqueue(&self, command: Cmd) -> Result<Enqueued, CommandError> {
        let mut state = self.state.lock();
        if let Some(error) = &state.broken {
            return Err(CommandError::NotSent(error.clone()));
        }
        if state.in_flight < MAX_IN_FLIGHT || state.queue.len() >= MAX_QUEUED {
            state.in_flight += 1;
            return Ok(Enqueued::SendNow(command));
        }
        let (reply, receiver) = oneshot::channel();
        state.queue.push_back(QueuedCommand { command, reply });
        Ok(Enqueued::Queued(receiver))
    }

    /// Marks the connection as broken. Queued commands fail as not sent.
    fn fail_queue(&self, error: &RedisError) {
        let queue = {
            let mut state = self.state.lock();
            state.broken = Some(error.clone());
            std::mem::take(&mut state.queue)
        };
        for queued in queue {
            let _ = queued.reply.send(Err(CommandError::NotSent(error.clone())));
        }
    }

    /// Takes the next batch. If it is empty, the caller's in-flight slot is free again.
    fn next_batch(&self) -> Vec<QueuedCommand> {
        let mut state = self.state.lock();
        let mut batch = Vec::new();
        while batch.len() < MAX_BATCH
            && let Some(queued) = state.queue.pop_front()
        {
            if !queued.reply.is_closed() {
                batch.push(queued);
            }
        }
        if batch.is_empty() {
            state.in_flight -= 1;
        }
        batch
    }

    async fn send_batches(self: Arc<Self>, mut batch: Vec<QueuedCommand>) {
        while !batch.is_empty() {
            let mut pipe = redis::pipe();
            let mut replies = Vec::with_capacity(batch.len());
            for QueuedCommand { command, reply } in batch {
                pipe.add_command(command);
                replies.push(reply);
            }
            match self.connection.clone().req_packed_commands(&pipe, 0, replies.len()).await {
                Ok(values) => {
                    for (reply, value) in replies.into_iter().zip(values) {
                        // The send fails if the caller has dropped its future; nothing else is needed then.
                        let _ = reply.send(Ok(value));
                    }
                }
                Err(error) => {
                    self.fail_queue(&error);
                    for reply in replies {
                        let _ = reply.send(Err(CommandError::Unknown(error.clone())));
                    }
                }
            }
            batch = self.next_batch();
        }
    }
}

/// The in-flight slot of a command that was sent alone. When it is dropped (also because the caller was cancelled), the commands that
/// were queued meanwhile are sent.
struct InFlightSlot<'a>(&'a Arc<Pipeline>);

impl Drop for InFlightSlot<'_> {
    fn drop(&mut self) {
        let batch = self.0.next_batch();
        if !batch.is_empty() {
            self.0.runtime.spawn(self.0.clone().send_batches(batch));
        }
    }
}

fn connection_aborted() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::ConnectionAborted).into()
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pipeline")
    }
}
