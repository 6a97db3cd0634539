//! The client: one connection for all commands, replaced when it breaks.
//!
//! A command that may have been executed is never sent again from here. A command that was certainly not executed may be: a script that
//! Redis does not have is sent as text, and a cluster command that a node refused is sent again (see [`crate::cluster`]).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use redis::aio::PubSub;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::sentinel::SentinelClient;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, FromRedisValue as _, RedisError, RedisResult, ToRedisArgs, Value};
use stampede_tls::Tls;
use tokio::sync::Mutex;

use crate::cluster;
use crate::error::{CommandError, ErrorClass, EvalShaError, check_reply, timeout_error};
use crate::pipeline::Pipeline;
use crate::script::Script;
use crate::servers::{self, Servers};

/// Makes connections.
enum Connector {
    Single(redis::Client),
    /// Behind a mutex because asking the sentinels needs exclusive access.
    Sentinel(Mutex<SentinelClient>),
    Cluster {
        client: ClusterClient,
        nodes: Vec<redis::Client>,
        /// The node that the next pub/sub connection goes to.
        next_pubsub: AtomicUsize,
    },
}

#[derive(Clone)]
enum Connection {
    Single(Arc<Pipeline>),
    Cluster(ClusterConnection),
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    /// Incremented with every connection.
    generation: u64,
    last_failure: Option<(Instant, RedisError)>,
}

/// A Redis client. It connects when the first command is sent, and reconnects with the next command after the connection broke.
pub struct Client {
    connector: Arc<Connector>,
    connect_timeout: Duration,
    response_timeout: Duration,
    state: Arc<RwLock<State>>,
    /// Held while connecting, so that concurrent callers share one attempt.
    connecting: Arc<Mutex<()>>,
}

/// After a failure to connect, calls fail with that failure for this long instead of connecting again.
const RECONNECT_DELAY: Duration = Duration::from_millis(20);

impl Client {
    /// Creates a client without connecting.
    ///
    /// # Errors
    /// If an address is invalid.
    pub fn new(servers: Servers, connect_timeout: Duration, response_timeout: Duration) -> RedisResult<Self> {
        let connector = Arc::new(Connector::new(servers, None, connect_timeout, response_timeout)?);
        Ok(Self { connector, connect_timeout, response_timeout, state: Arc::default(), connecting: Arc::default() })
    }

    /// How many connections have been made so far. State learned over one connection may not hold on the next, because the server may
    /// have been restarted or replaced. The connection to a cluster counts as one, even if connections to its nodes are replaced.
    pub fn connection_count(&self) -> u64 {
        self.state.read().generation
    }

    /// The number of the present connection, which [`connection_count`](Self::connection_count) has counted; `None` while there is none.
    pub fn current_connection(&self) -> Option<u64> {
        let state = self.state.read();
        state.connection.as_ref().map(|_| state.generation)
    }

    /// Sends a command.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub async fn send(&self, command: Cmd) -> Result<Value, CommandError> {
        let (connection, generation) = self.connect().await?;
        let reply = match &connection {
            Connection::Single(pipeline) => pipeline.send(command).await.and_then(check_reply),
            Connection::Cluster(cluster) => cluster::send(cluster, &command, self.response_timeout).await,
        };
        self.check_connection(generation, reply)
    }

    /// Runs a script by its hash. If the server does not have it, sends the text, which also loads the script.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub async fn eval<K: ToRedisArgs, A: ToRedisArgs>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[A],
    ) -> Result<Value, CommandError> {
        match self.send(script.eval_sha(keys, args)).await {
            Err(error) if error.is_no_script() => self.send(script.eval(keys, args)).await,
            result => result,
        }
    }

    /// Runs a script by its hash only (`EVALSHA`). Unlike [`eval`](Self::eval) it never loads the script: a server that has lost its
    /// memory must not run a script that relies on earlier state.
    ///
    /// # Errors
    /// [`EvalShaError::NoScript`] if the server does not have the script; nothing was executed then.
    pub async fn eval_sha<K: ToRedisArgs, A: ToRedisArgs>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[A],
    ) -> Result<Value, EvalShaError> {
        self.send(script.eval_sha(keys, args)).await.map_err(|error| match error {
            error if error.is_no_script() => EvalShaError::NoScript,
            error => EvalShaError::Command(error),
        })
    }

    /// Loads a script (`SCRIPT LOAD`), on a cluster into every master.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub async fn script_load(&self, script: &Script) -> Result<(), CommandError> {
        self.send(script.load()).await.map(drop)
    }

    /// Runs a script as [`eval`](Self::eval) does, then waits until this many replicas have confirmed its writes (`WAIT`), for at most
    /// half of the response timeout. Returns the reply and the number of replicas that have confirmed. On a cluster the first key
    /// selects the node.
    ///
    /// `WAIT` concerns the writes of its own connection, so it is sent over the shared one, and commands of other callers queue behind
    /// it.
    ///
    /// # Errors
    /// See [`CommandError`].
    pub async fn eval_replicated<K: ToRedisArgs + AsRef<[u8]>, A: ToRedisArgs>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[A],
        replicas: usize,
    ) -> Result<(Value, usize), CommandError> {
        let mut wait = redis::cmd("WAIT");
        let timeout_ms = (self.response_timeout / 2).as_millis().max(1);
        wait.arg(replicas).arg(timeout_ms.to_string());
        let (connection, generation) = self.connect().await?;
        let key = keys.first().map(AsRef::as_ref).unwrap_or_default();
        let replies = match self.send_both(&connection, script.eval_sha(keys, args), &wait, key).await {
            Err(error) if error.is_no_script() => {
                self.send_both(&connection, script.eval(keys, args), &wait, key).await
            }
            result => result,
        };
        let [value, confirmed] = self.check_connection(generation, replies)?;
        let confirmed = usize::from_redis_value(confirmed).map_err(|error| CommandError::Unknown(error.into()))?;
        if confirmed < replicas && matches!(*self.connector, Connector::Sentinel(_)) {
            // The master may have been replaced without knowing it. Reconnecting asks the sentinels.
            self.discard_connection(generation);
        }
        Ok((value, confirmed))
    }

    /// Sends one command, then another one over the same connection.
    async fn send_both(
        &self,
        connection: &Connection,
        first: Cmd,
        second: &Cmd,
        key: &[u8],
    ) -> Result<[Value; 2], CommandError> {
        match connection {
            Connection::Single(pipeline) => {
                let value = pipeline.send(first).await.and_then(check_reply)?;
                // The first command has been executed, so a failure of the second leaves the outcome of both unknown.
                let second = pipeline.send(second.clone()).await.and_then(check_reply);
                Ok([value, second.map_err(|error| CommandError::Unknown(error.into_inner()))?])
            }
            Connection::Cluster(cluster) => {
                cluster::send_both(cluster, [&first, second], key, self.response_timeout).await
            }
        }
    }

    /// Discards the connection if the result shows that it may be broken.
    fn check_connection<T>(&self, generation: u64, result: Result<T, CommandError>) -> Result<T, CommandError> {
        if matches!(result, Err(CommandError::NotSent(_) | CommandError::Unknown(_))) {
            self.discard_connection(generation);
        }
        result
    }

    /// Opens a connection for pub/sub.
    ///
    /// # Errors
    /// If the connection cannot be made in time.
    pub async fn pubsub(&self) -> RedisResult<PubSub> {
        let connecting = async {
            match &*self.connector {
                Connector::Single(client) => client.get_async_pubsub().await,
                Connector::Sentinel(sentinel) => {
                    sentinel.lock().await.async_get_client().await?.get_async_pubsub().await
                }
                // Every node of a cluster receives the messages published on any of them. Nodes are tried in turn, because one may
                // not respond.
                Connector::Cluster { nodes, next_pubsub, .. } => {
                    let index = next_pubsub.fetch_add(1, Ordering::Relaxed) % nodes.len().max(1);
                    let node =
                        nodes.get(index).ok_or((ErrorKind::ClusterConnectionNotFound, "no node of the cluster"))?;
                    node.get_async_pubsub().await
                }
            }
        };
        tokio::time::timeout(self.total_connect_timeout(), connecting).await.unwrap_or_else(|_| Err(timeout_error()))
    }

    /// The connect timeout, extended where sentinels or cluster nodes have to be asked first, because one of them may not respond.
    fn total_connect_timeout(&self) -> Duration {
        match *self.connector {
            Connector::Single(_) => self.connect_timeout,
            Connector::Sentinel(_) | Connector::Cluster { .. } => 3 * self.connect_timeout,
        }
    }

    async fn connect(&self) -> Result<(Connection, u64), CommandError> {
        self.connection().await.map_err(|error| match ErrorClass::of(&error) {
            ErrorClass::Permanent => CommandError::Refused(error),
            ErrorClass::Transient | ErrorClass::Unknown => CommandError::NotSent(error),
        })
    }

    async fn connection(&self) -> RedisResult<(Connection, u64)> {
        if let Some(current) = self.current() {
            return current;
        }
        let permit = self.connecting.clone().lock_owned().await;
        if let Some(current) = self.current() {
            return current;
        }
        let (connector, state) = (self.connector.clone(), self.state.clone());
        let (connect_timeout, response_timeout) = (self.total_connect_timeout(), self.response_timeout);
        // Connecting runs in its own task, so that a caller that is cancelled does not abort an attempt that others wait for.
        let connecting = tokio::spawn(async move {
            let connected = tokio::time::timeout(connect_timeout, connector.connect(response_timeout)).await;
            let connected = connected.unwrap_or_else(|_| Err(timeout_error()));
            let mut state = state.write();
            let result = match connected {
                Ok(connection) => {
                    state.generation += 1;
                    state.last_failure = None;
                    state.connection = Some(connection.clone());
                    Ok((connection, state.generation))
                }
                Err(error) => {
                    state.last_failure = Some((Instant::now(), error.clone()));
                    Err(error)
                }
            };
            drop(permit);
            result
        });
        connecting.await.unwrap_or_else(|_| Err(timeout_error()))
    }

    /// The current connection, or the last failure if it is too recent to connect again.
    fn current(&self) -> Option<RedisResult<(Connection, u64)>> {
        let state = self.state.read();
        match (&state.connection, &state.last_failure) {
            (Some(connection), _) => Some(Ok((connection.clone(), state.generation))),
            (None, Some((at, error))) if at.elapsed() < RECONNECT_DELAY => Some(Err(error.clone())),
            _ => None,
        }
    }

    /// Stops using the connection. Commands in flight may still be answered. The connection to a cluster is kept: it replaces the
    /// connections to its nodes itself, and one node that does not respond is no reason to drop the others.
    fn discard_connection(&self, generation: u64) {
        if matches!(*self.connector, Connector::Cluster { .. }) {
            return;
        }
        let mut state = self.state.write();
        if state.generation == generation {
            state.connection = None;
        }
    }
}

impl Connector {
    fn new(
        servers: Servers,
        tls: Option<&Tls>,
        connect_timeout: Duration,
        response_timeout: Duration,
    ) -> RedisResult<Self> {
        Ok(match servers {
            Servers::WithTls(servers, tls) => Self::new(*servers, Some(&tls), connect_timeout, response_timeout)?,
            Servers::Single(url) => Self::Single(servers::single(&url, tls)?),
            Servers::Sentinel { sentinels, master, node } => {
                Self::Sentinel(Mutex::new(servers::sentinel(&sentinels, &master, node.as_deref(), tls)?))
            }
            Servers::Cluster(urls) => {
                let nodes = urls.iter().map(|url| servers::single(url, tls)).collect::<RedisResult<_>>()?;
                let client = servers::cluster(urls, tls)
                    .connection_timeout(connect_timeout)
                    .response_timeout(response_timeout)
                    .overall_response_timeout(Some(response_timeout))
                    .retries(0)
                    .build()?;
                Self::Cluster { client, nodes, next_pubsub: AtomicUsize::new(0) }
            }
        })
    }

    async fn connect(&self, response_timeout: Duration) -> RedisResult<Connection> {
        // The caller enforces the connect timeout.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(Some(response_timeout));
        let client = match self {
            Self::Single(client) => client.clone(),
            Self::Sentinel(sentinel) => sentinel.lock().await.async_get_client().await?,
            Self::Cluster { client, .. } => return Ok(Connection::Cluster(client.get_async_connection().await?)),
        };
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Connection::Single(Pipeline::new(connection)))
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}
