//! Sessions in Redis, for tiers with several nodes. The ledger has every session, Redis has copies: a node that does not have a session
//! in memory reads the copy instead of asking the ledger, and a session that ends on one node ends on all of them at once.
//!
//! | key | holds | deleted |
//! |---|---|---|
//! | `stampede:L:session:I:ID` | user and time of the login; or `ended` | when the session expires; `ended` after a minute |
//!
//! - A Redis that has lost its memory ends no session. `I` is the incarnation of the gate: a copy from before a rebuild is not used, so
//!   that an older copy of Redis revives no session.
//! - A copy is written only where there is none, and the end of a session replaces its copy. So a look-up that has read the ledger before
//!   the end cannot bring the session back.
//! - Ends are published. While their messages do not arrive, the cache of this process is not used.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use stampede_core::ports::{Accounts, LedgerError, Session, SessionId};
use stampede_core::{Timestamp, UserId};
use stampede_gate::RedisGate;
use stampede_redis::{Client, CommandError, Script};

/// How long the end of a session stays in Redis: longer than any look-up takes.
const ENDED_TTL: Duration = Duration::from_secs(60);
/// The most ends that wait to be published again. Beyond that the oldest is dropped: its session ends on the other nodes when their
/// copies expire.
const MAX_UNPUBLISHED: usize = 10_000;
/// Copies that are written at once.
const CONCURRENT_WRITES: usize = 64;
/// What the copy of a session that has ended holds.
const ENDED: &str = "ended";

/// A session that has ended, and its user.
type Ended = (SessionId, UserId);

pub(crate) struct SharedSessions {
    client: Arc<Client>,
    gate: Arc<RedisGate>,
    prefix: String,
    put: Script,
    end: Script,
    is_listening: AtomicBool,
    /// Incremented with every subscription: messages before it were missed.
    subscriptions: AtomicU64,
    /// Ends that could not be published.
    unpublished: Mutex<Vec<Ended>>,
}

/// What Redis holds about a session.
enum StoredSession {
    Open(Session),
    Ended,
    Missing,
}

impl SharedSessions {
    pub(crate) fn new(client: Arc<Client>, gate: Arc<RedisGate>, ledger_id: &str) -> Self {
        Self {
            client,
            gate,
            prefix: format!("stampede:{ledger_id}:session"),
            put: Script::new(include_str!("shared_sessions/put.lua")),
            end: Script::new(include_str!("shared_sessions/end.lua")),
            is_listening: AtomicBool::new(false),
            subscriptions: AtomicU64::new(0),
            unpublished: Mutex::default(),
        }
    }

    /// The channel of ended sessions.
    pub(crate) fn channel(&self) -> String {
        format!("{}s", self.prefix)
    }

    /// Whether every end of a session since the last subscription has arrived, or will.
    pub(crate) fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Acquire)
    }

    /// The number of the present subscription. What was read under an earlier one must not be cached.
    pub(crate) fn subscription(&self) -> u64 {
        self.subscriptions.load(Ordering::Acquire)
    }

    /// A subscription has begun. `clear` clears the cache of this process.
    pub(crate) fn subscribed(&self, clear: impl FnOnce()) {
        self.subscriptions.fetch_add(1, Ordering::AcqRel);
        clear();
        self.is_listening.store(true, Ordering::Release);
    }

    pub(crate) fn disconnected(&self) {
        self.is_listening.store(false, Ordering::Release);
    }

    fn key(&self, id: SessionId) -> String {
        format!("{}:{}:{}", self.prefix, self.gate.incarnation(), hex(id))
    }

    /// The session, from its copy or from the ledger. `None` if it has ended or expired.
    pub(crate) async fn read(
        &self,
        accounts: &dyn Accounts,
        id: SessionId,
        now: Timestamp,
    ) -> Result<Option<Session>, LedgerError> {
        // One key for the whole look-up: see above.
        let key = self.key(id);
        match self.get(&key, id).await {
            Ok(StoredSession::Open(session)) if session.expires_at > now => return Ok(Some(session)),
            Ok(StoredSession::Ended) => return Ok(None),
            Ok(StoredSession::Open(_) | StoredSession::Missing) => {}
            Err(error) => tracing::debug!(%error, "cannot read a session from Redis; asking the ledger"),
        }
        let Some(session) = accounts.session(id, now).await? else { return Ok(None) };
        match self.put_at(&key, &session).await {
            Ok(true) => Ok(Some(session)),
            Ok(false) => Ok(None),
            Err(error) => {
                tracing::debug!(%error, "cannot copy a session to Redis");
                Ok(Some(session))
            }
        }
    }

    async fn get(&self, key: &str, id: SessionId) -> Result<StoredSession, CommandError> {
        let command = |name: &'static str| {
            let mut command = redis::cmd(name);
            command.arg(key);
            self.client.send(command)
        };
        let (value, expires_ms) = tokio::join!(command("GET"), command("PEXPIRETIME"));
        let value = read::<Option<String>>(value?)?;
        let expires_ms = read::<i64>(expires_ms?)?;
        Ok(match value.as_deref() {
            None => StoredSession::Missing,
            Some(ENDED) => StoredSession::Ended,
            Some(value) => match parse(value) {
                // It has expired between the two commands if it has no expiry.
                Some((user, created_at)) if expires_ms > 0 => {
                    StoredSession::Open(Session { id, user, created_at, expires_at: Timestamp::from_ms(expires_ms) })
                }
                _ => StoredSession::Missing,
            },
        })
    }

    /// Copies a session unless there is a copy. `false` if it has ended.
    async fn put_at(&self, key: &str, session: &Session) -> Result<bool, CommandError> {
        let args = [format_copy(session), session.expires_at.ms().to_string()];
        let held: String = read(self.client.eval(&self.put, &[key], &args).await?)?;
        Ok(held != ENDED)
    }

    /// Copies new sessions. Without a copy, a session is read from the ledger.
    pub(crate) async fn put_new(&self, sessions: &[Session]) {
        futures_util::stream::iter(sessions)
            .for_each_concurrent(CONCURRENT_WRITES, |session| async move {
                if let Err(error) = self.put_at(&self.key(session.id), session).await {
                    tracing::debug!(%error, "cannot copy a session to Redis");
                }
            })
            .await;
    }

    /// Moves the expiry of copies.
    pub(crate) async fn extend(&self, sessions: &[Session]) {
        futures_util::stream::iter(sessions)
            .for_each_concurrent(CONCURRENT_WRITES, |session| async move {
                let mut command = redis::cmd("PEXPIREAT");
                command.arg(self.key(session.id)).arg(session.expires_at.ms()).arg("GT");
                if let Err(error) = self.client.send(command).await {
                    tracing::debug!(%error, "cannot move the expiry of a session in Redis");
                }
            })
            .await;
    }

    /// Ends sessions on all nodes. They have ended in the ledger. What fails is tried again by [`publish_again`](Self::publish_again).
    pub(crate) async fn end(&self, sessions: &[SessionId], user: UserId) -> Result<(), CommandError> {
        let ended: Vec<Ended> = sessions.iter().map(|&id| (id, user)).collect();
        let published = self.publish(&ended).await;
        if published.is_err() {
            let mut unpublished = self.unpublished.lock();
            unpublished.extend(ended);
            let excess = unpublished.len().saturating_sub(MAX_UNPUBLISHED);
            unpublished.drain(..excess);
        }
        published
    }

    async fn publish(&self, ended: &[Ended]) -> Result<(), CommandError> {
        if ended.is_empty() {
            return Ok(());
        }
        let keys: Vec<String> = ended.iter().map(|(id, _)| self.key(*id)).collect();
        let mut args = vec![self.channel(), ENDED_TTL.as_millis().to_string()];
        args.extend(ended.iter().map(|(id, user)| format!("{} {user}", hex(*id))));
        self.client.eval(&self.end, &keys, &args).await.map(drop)
    }

    /// Publishes ends that could not be published.
    pub(crate) async fn publish_again(&self) {
        let ended = std::mem::take(&mut *self.unpublished.lock());
        if let Err(error) = self.publish(&ended).await {
            tracing::warn!(%error, sessions = ended.len(), "cannot tell the other nodes of ended sessions; trying again");
            self.unpublished.lock().extend(ended);
        }
    }
}

fn hex(SessionId(id): SessionId) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

/// The session of a message on the channel.
pub(crate) fn parse_message(message: &[u8]) -> Option<Ended> {
    let (id, user) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    let id = u128::from_str_radix(id, 16).ok().filter(|_| id.len() == 32)?;
    Some((SessionId(id.to_be_bytes()), user.parse().ok()?))
}

fn format_copy(session: &Session) -> String {
    format!("{} {}", session.user, session.created_at.ms())
}

fn parse(copy: &str) -> Option<(UserId, Timestamp)> {
    let (user, created_at) = copy.split_once(' ')?;
    Some((user.parse().ok()?, Timestamp::from_ms(created_at.parse().ok()?)))
}

fn read<T: redis::FromRedisValue>(reply: redis::Value) -> Result<T, CommandError> {
    T::from_redis_value(reply).map_err(|error| CommandError::Unknown(error.into()))
}

impl fmt::Debug for SharedSessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSessions").field("is_listening", &self.is_listening).finish_non_exhaustive()
    }
}
