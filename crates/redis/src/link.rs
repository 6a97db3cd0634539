//! The way to Redis: one connection for everything, made anew when it breaks.
//!
//! A command that may have been carried out is never sent again from here. One that was surely not is: a script that Redis does not know,
//! and on a cluster what a node refused to carry out (see [`crate::cluster`]).

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use redis::aio::PubSub;
use redis::cluster::{ClusterClient, ClusterClientBuilder};
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClient, SentinelNodeConnectionInfo, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue as _, RedisError, RedisResult, ServerErrorKind, Value,
};
use tokio::sync::Mutex;

use crate::cluster;
use crate::line::Line;
use crate::script::Script;

/// Where Redis is.
#[derive(Clone)]
#[non_exhaustive]
pub enum Servers {
    /// One server, by its URL.
    One(String),
    /// The master of this name, as the sentinels at these URLs know it.
    Sentinel {
        /// URLs of the sentinels.
        sentinels: Vec<String>,
        /// The name of the master.
        master: String,
        /// Credentials and database of the master, if it needs any.
        node: Option<SentinelNodeConnectionInfo>,
    },
    /// A cluster, by the URLs of some of its nodes.
    Cluster(Vec<String>),
}

impl From<&str> for Servers {
    fn from(url: &str) -> Self {
        Self::One(url.to_owned())
    }
}

impl From<String> for Servers {
    fn from(url: String) -> Self {
        Self::One(url)
    }
}

/// URLs may hold passwords.
impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::One(_) => "One",
            Self::Sentinel { .. } => "Sentinel",
            Self::Cluster(_) => "Cluster",
        })
    }
}

enum Dial {
    One(Client),
    /// Asking the sentinels needs it alone.
    Sentinel(Mutex<SentinelClient>),
    Cluster {
        client: ClusterClient,
        nodes: Vec<Client>,
        /// The node to listen to next.
        next: AtomicUsize,
    },
}

#[derive(Clone)]
enum Connection {
    One(Arc<Line>),
    Cluster(ClusterConnection),
}

/// Why a command has no answer.
#[derive(Debug)]
pub enum Failure {
    /// There was no connection, or no server that is ready: it did not happen.
    NotSent(RedisError),
    /// It may have happened, or may happen yet.
    Unknown(RedisError),
    /// Redis said no: it did not happen.
    Refused(RedisError),
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    /// Rises with every connection.
    generation: u64,
    failed: Option<(Instant, RedisError)>,
}

/// The way to Redis.
pub struct Link {
    dial: Arc<Dial>,
    connect_within: Duration,
    answer_within: Duration,
    state: Arc<RwLock<State>>,
    dialing: Arc<Mutex<()>>,
}

/// After a failure to connect, so long everybody hears of that failure instead of trying again.
const PAUSE: Duration = Duration::from_millis(20);

impl Link {
    /// # Errors
    /// If the addresses cannot be used. Nothing is connected yet.
    pub fn new(servers: Servers, connect_within: Duration, answer_within: Duration) -> RedisResult<Self> {
        let dial = Arc::new(Dial::new(servers, connect_within, answer_within)?);
        Ok(Self { dial, connect_within, answer_within, state: Arc::default(), dialing: Arc::default() })
    }

    /// How many connections there were so far: what was learned on one may not hold on the next, because the server was restarted or is
    /// another. A cluster's connection counts as one, whatever it does.
    pub fn connections(&self) -> u64 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).generation
    }

    /// Sends a command.
    pub async fn send(&self, command: Cmd) -> Result<Value, Failure> {
        let (connection, generation) = self.connect().await?;
        let answer = match &connection {
            Connection::One(line) => line.send(command).await.and_then(checked),
            Connection::Cluster(cluster) => cluster::send(cluster, &command, self.answer_within).await,
        };
        self.judge(generation, answer)
    }

    /// Runs a script.
    pub async fn run<K: redis::ToRedisArgs, A: redis::ToRedisArgs>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[A],
    ) -> Result<Value, Failure> {
        match self.send(script.by_hash(keys, args)).await {
            Err(failure) if failure.is_unknown_script() => self.send(script.by_text(keys, args)).await,
            outcome => outcome,
        }
    }

    /// Runs a script, and then waits until so many replicas have confirmed what it wrote, at most half of the time that an answer may
    /// take. Returns also how many have. The first key says on which node of a cluster.
    ///
    /// `WAIT` is about the connection's own writes, so it goes over the same connection; what others send over it meanwhile waits.
    pub async fn run_replicated<K: redis::ToRedisArgs + AsRef<[u8]>, A: redis::ToRedisArgs>(
        &self,
        script: &Script,
        keys: &[K],
        args: &[A],
        replicas: usize,
    ) -> Result<(Value, usize), Failure> {
        let mut wait = redis::cmd("WAIT");
        let within_ms = (self.answer_within / 2).as_millis().max(1);
        wait.arg(replicas).arg(within_ms.to_string());
        let (connection, generation) = self.connect().await?;
        let key = keys.first().map(AsRef::as_ref).unwrap_or_default();
        let answers = match self.send_both(&connection, script.by_hash(keys, args), &wait, key).await {
            Err(failure) if failure.is_unknown_script() => {
                self.send_both(&connection, script.by_text(keys, args), &wait, key).await
            }
            outcome => outcome,
        };
        let [value, confirmed] = self.judge(generation, answers)?;
        let confirmed = usize::from_redis_value(confirmed).map_err(|error| Failure::Unknown(error.into()))?;
        if confirmed < replicas && matches!(*self.dial, Dial::Sentinel(_)) {
            // It may have been replaced and not know it: the sentinels do.
            self.hang_up(generation);
        }
        Ok((value, confirmed))
    }

    /// Sends one command, and after it another over the same connection.
    async fn send_both(&self, connection: &Connection, one: Cmd, two: &Cmd, key: &[u8]) -> Result<[Value; 2], Failure> {
        match connection {
            Connection::One(line) => {
                let value = line.send(one).await.and_then(checked)?;
                // Whatever becomes of the second, the first has been carried out.
                let second = line.send(two.clone()).await.and_then(checked);
                Ok([value, second.map_err(|failure| Failure::Unknown(failure.into_error()))?])
            }
            Connection::Cluster(cluster) => cluster::send_both(cluster, [&one, two], key, self.answer_within).await,
        }
    }

    /// After an answer that makes the connection doubtful, nothing more goes there.
    fn judge<T>(&self, generation: u64, answer: Result<T, Failure>) -> Result<T, Failure> {
        if matches!(answer, Err(Failure::NotSent(_) | Failure::Unknown(_))) {
            self.hang_up(generation);
        }
        answer
    }

    /// A connection for messages, to a server that hears all of them.
    pub async fn listen(&self) -> RedisResult<PubSub> {
        let connecting = async {
            match &*self.dial {
                Dial::One(client) => client.get_async_pubsub().await,
                Dial::Sentinel(sentinel) => sentinel.lock().await.async_get_client().await?.get_async_pubsub().await,
                // Every node of a cluster hears what is published on any of them. Another one each time, as one may not answer.
                Dial::Cluster { nodes, next, .. } => {
                    let at = next.fetch_add(1, Ordering::Relaxed) % nodes.len().max(1);
                    let node = nodes.get(at).ok_or((ErrorKind::ClusterConnectionNotFound, "no node of the cluster"))?;
                    node.get_async_pubsub().await
                }
            }
        };
        tokio::time::timeout(self.dial_within(), connecting).await.unwrap_or_else(|_| Err(too_late()))
    }

    /// Sentinels and nodes of a cluster may have to be asked before the connection is made, and one of them may not answer.
    fn dial_within(&self) -> Duration {
        match *self.dial {
            Dial::One(_) => self.connect_within,
            Dial::Sentinel(_) | Dial::Cluster { .. } => 3 * self.connect_within,
        }
    }

    async fn connect(&self) -> Result<(Connection, u64), Failure> {
        self.connection().await.map_err(|error| match Said::of(&error) {
            Said::No => Failure::Refused(error),
            _ => Failure::NotSent(error),
        })
    }

    async fn connection(&self) -> RedisResult<(Connection, u64)> {
        if let Some(known) = self.known() {
            return known;
        }
        let alone = self.dialing.clone().lock_owned().await;
        if let Some(known) = self.known() {
            return known;
        }
        let (dial, state) = (self.dial.clone(), self.state.clone());
        let (within, answer_within) = (self.dial_within(), self.answer_within);
        // In a task of its own: a caller whose time is up does not end what the next one would have to begin again.
        let dialing = tokio::spawn(async move {
            let dialed = tokio::time::timeout(within, dial.connect(answer_within)).await;
            let dialed = dialed.unwrap_or_else(|_| Err(too_late()));
            let mut state = state.write().unwrap_or_else(PoisonError::into_inner);
            let outcome = match dialed {
                Ok(connection) => {
                    state.generation += 1;
                    state.failed = None;
                    state.connection = Some(connection.clone());
                    Ok((connection, state.generation))
                }
                Err(error) => {
                    state.failed = Some((Instant::now(), error.clone()));
                    Err(error)
                }
            };
            drop(alone);
            outcome
        });
        dialing.await.unwrap_or_else(|_| Err(too_late()))
    }

    /// The connection there is, or the failure that is too fresh to try again.
    fn known(&self) -> Option<RedisResult<(Connection, u64)>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        match (&state.connection, &state.failed) {
            (Some(connection), _) => Some(Ok((connection.clone(), state.generation))),
            (None, Some((at, error))) if at.elapsed() < PAUSE => Some(Err(error.clone())),
            _ => None,
        }
    }

    /// What is under way on the connection may still be answered; nothing new goes there. A cluster's connection sees to its nodes itself:
    /// one that does not answer is no reason to leave the others.
    fn hang_up(&self, generation: u64) {
        if matches!(*self.dial, Dial::Cluster { .. }) {
            return;
        }
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.generation == generation {
            state.connection = None;
        }
    }
}

impl Dial {
    fn new(servers: Servers, connect_within: Duration, answer_within: Duration) -> RedisResult<Self> {
        Ok(match servers {
            Servers::One(url) => Self::One(Client::open(url)?),
            Servers::Sentinel { sentinels, master, node } => {
                let client = SentinelClient::build(sentinels, master, node, SentinelServerType::Master)?;
                Self::Sentinel(Mutex::new(client))
            }
            Servers::Cluster(urls) => {
                let nodes = urls.iter().map(|url| Client::open(url.as_str())).collect::<RedisResult<_>>()?;
                let client = ClusterClientBuilder::new(urls)
                    .connection_timeout(connect_within)
                    .response_timeout(answer_within)
                    .overall_response_timeout(Some(answer_within))
                    .retries(0)
                    .build()?;
                Self::Cluster { client, nodes, next: AtomicUsize::new(0) }
            }
        })
    }

    async fn connect(&self, answer_within: Duration) -> RedisResult<Connection> {
        // The caller bounds how long connecting may take.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(Some(answer_within));
        Ok(match self {
            Self::One(client) => {
                Connection::One(Line::new(client.get_multiplexed_async_connection_with_config(&config).await?))
            }
            Self::Sentinel(sentinel) => {
                let client = sentinel.lock().await.async_get_client().await?;
                Connection::One(Line::new(client.get_multiplexed_async_connection_with_config(&config).await?))
            }
            Self::Cluster { client, .. } => Connection::Cluster(client.get_async_connection().await?),
        })
    }
}

/// What a server said with an error.
pub(crate) enum Said {
    /// It would say so again.
    No,
    /// It is not ready, not the master, or not the node for this: it was not carried out, and another connection may do better.
    NotNow,
    Nothing,
}

/// The answer, or the error in it.
fn checked(value: Value) -> Result<Value, Failure> {
    value.extract_error().map_err(|error| Said::of(&error).failure(error))
}

impl Failure {
    fn into_error(self) -> RedisError {
        match self {
            Self::NotSent(error) | Self::Unknown(error) | Self::Refused(error) => error,
        }
    }

    fn is_unknown_script(&self) -> bool {
        matches!(self, Self::Refused(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
    }
}

impl Said {
    pub(crate) fn failure(self, error: RedisError) -> Failure {
        match self {
            Self::No => Failure::Refused(error),
            Self::NotNow => Failure::NotSent(error),
            Self::Nothing => Failure::Unknown(error),
        }
    }

    pub(crate) fn of(error: &RedisError) -> Self {
        use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, ReadOnly, TryAgain};
        match error.kind() {
            ErrorKind::Server(Ask | BusyLoading | ClusterDown | MasterDown | Moved | ReadOnly | TryAgain) => {
                Self::NotNow
            }
            ErrorKind::Extension if matches!(error.code(), Some("BUSY" | "NOREPLICAS")) => Self::NotNow,
            ErrorKind::Server(_) | ErrorKind::Extension => Self::No,
            ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => Self::No,
            ErrorKind::ClusterConnectionNotFound => Self::NotNow,
            _ if error.is_connection_refusal() => Self::NotNow,
            _ => Self::Nothing,
        }
    }
}

/// Is the connection of no use after this? The server's own errors come over one that works.
pub(crate) fn is_broken(error: &RedisError) -> bool {
    matches!(Said::of(error), Said::Nothing)
}

/// The error of something that took too long.
pub fn too_late() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}
