//! Natural batching on one connection: what comes while commands are under way waits, and then goes together, in one write. With one
//! caller nothing waits.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Cmd, RedisError, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::link::{Failure, Said, is_broken};

/// How many writes are under way at once: the next one is made while the answers of the last are handed out.
const UNDER_WAY: usize = 2;
/// The most commands in one write.
const TOGETHER: usize = 512;
/// The most commands that wait. More are sent by themselves, and wait where the connection makes them.
const WAITING: usize = 65_536;

type Answer = Result<Value, Failure>;

struct Item {
    command: Cmd,
    reply: oneshot::Sender<Answer>,
}

enum Entered {
    /// Its turn is now.
    Now(Cmd),
    /// It goes with others.
    Later(oneshot::Receiver<Answer>),
}

#[derive(Default)]
struct State {
    under_way: usize,
    waiting: VecDeque<Item>,
    /// The connection is of no use any more.
    broken: Option<RedisError>,
}

pub(crate) struct Line {
    connection: MultiplexedConnection,
    runtime: Handle,
    state: Mutex<State>,
}

impl Line {
    pub(crate) fn new(connection: MultiplexedConnection) -> Arc<Self> {
        Arc::new(Self { connection, runtime: Handle::current(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command, alone or with others. If the caller goes away before it is sent, it is not sent.
    pub(crate) async fn send(self: &Arc<Self>, command: Cmd) -> Answer {
        let command = match self.enter(command)? {
            Entered::Now(command) => command,
            Entered::Later(answer) => return answer.await.unwrap_or_else(|_| Err(Failure::Unknown(gone()))),
        };
        let turn = Turn(self);
        let answer = self.connection.clone().req_packed_command(&command).await;
        if let Err(error) = &answer
            && is_broken(error)
        {
            self.broke(error);
        }
        drop(turn);
        answer.map_err(|error| Said::of(&error).failure(error))
    }

    fn enter(&self, command: Cmd) -> Result<Entered, Failure> {
        let mut state = self.state();
        if let Some(error) = &state.broken {
            return Err(Failure::NotSent(error.clone()));
        }
        if state.under_way < UNDER_WAY || state.waiting.len() >= WAITING {
            state.under_way += 1;
            return Ok(Entered::Now(command));
        }
        let (reply, answer) = oneshot::channel();
        state.waiting.push_back(Item { command, reply });
        Ok(Entered::Later(answer))
    }

    /// Whatever waits was not sent, and is not going to be.
    fn broke(&self, error: &RedisError) {
        let waiting = {
            let mut state = self.state();
            state.broken = Some(error.clone());
            std::mem::take(&mut state.waiting)
        };
        for item in waiting {
            let _ = item.reply.send(Err(Failure::NotSent(error.clone())));
        }
    }

    /// What goes next. If nothing does, one less is under way.
    fn next(&self) -> Vec<Item> {
        let mut state = self.state();
        let mut items = Vec::new();
        while items.len() < TOGETHER
            && let Some(item) = state.waiting.pop_front()
        {
            if !item.reply.is_closed() {
                items.push(item);
            }
        }
        if items.is_empty() {
            state.under_way -= 1;
        }
        items
    }

    async fn carry_out(self: Arc<Self>, mut items: Vec<Item>) {
        while !items.is_empty() {
            let mut together = redis::pipe();
            let mut replies = Vec::with_capacity(items.len());
            for Item { command, reply } in items {
                together.add_command(command);
                replies.push(reply);
            }
            let answers = self.connection.clone().req_packed_commands(&together, 0, replies.len()).await;
            match answers {
                Ok(values) => {
                    for (reply, value) in replies.into_iter().zip(values) {
                        // A caller that has gone does not want its answer.
                        let _ = reply.send(Ok(value));
                    }
                }
                Err(error) => {
                    self.broke(&error);
                    for reply in replies {
                        let _ = reply.send(Err(Failure::Unknown(error.clone())));
                    }
                }
            }
            items = self.next();
        }
    }
}

/// The turn of a command that went alone. What has come meanwhile goes when it ends, also if its caller has gone.
struct Turn<'a>(&'a Arc<Line>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let items = self.0.next();
        if !items.is_empty() {
            self.0.runtime.spawn(self.0.clone().carry_out(items));
        }
    }
}

fn gone() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::ConnectionAborted).into()
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Line")
    }
}
