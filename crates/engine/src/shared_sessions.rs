//! Sessions in Redis, for tiers with several nodes. The ledger has every session, Redis has copies: a node that does not have a session
//! in memory reads the copy instead of asking the ledger, and a session that ends on one node ends on all of them at once.
//!
//! | key | holds | deleted |
//! |---|---|---|
//! | `stampede:L:session:I:ID` | user, time of the login and expiry of a session | after five minutes |
//! | `stampede:L:session:ended:ID` | the session has ended | after ten minutes |
//! | `stampede:L:session:revoked:USER` | all sessions of the user were ended | after ten minutes |
//! | `stampede:L:session:writable` | nothing; written with every look-up of a copy | after a second |
//!
//! - The end of a session is written before it is published, and lasts longer than any copy and any look-up. So a look-up that has read
//!   the ledger before the end cannot bring the session back.
//! - While a user's sessions are revoked, their copies are not used: the ledger is asked. So revoking again ends what was missed.
//! - Ends are published. While their messages do not arrive, the cache of this process is not used.
//! - A look-up writes before it reads. So while Redis refuses writes (its memory is full, or its replicas are away), when the end of a
//!   session cannot be written either, no copy is used and the ledger decides. Ends are published all the same, for the caches.
//! - A Redis that has lost its memory ends no session. `I` is the incarnation of the gate: copies from before a rebuild are not used, and
//!   the caches of all processes are cleared, so that an older copy of Redis revives no session for longer than that takes.
//! - An end that could not be written anywhere, because its node died, counts once the copies have expired.

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

use crate::failpoints::hit_on_another_thread;

/// How long a copy is used before the ledger is asked again.
const COPY_TTL: Duration = Duration::from_secs(300);
/// How long the end of a session stays in Redis: longer than a copy, and than any look-up takes.
const ENDED_TTL: Duration = Duration::from_secs(600);
/// How long the key stays that a look-up writes.
const WRITABLE_TTL: Duration = Duration::from_secs(1);
/// The most ends that wait to be written again. Beyond that the oldest is dropped: its session ends on the other nodes when their
/// copies expire.
const MAX_UNWRITTEN: usize = 10_000;
/// Copies that are written at once.
const CONCURRENT_WRITES: usize = 64;

/// What has ended: one session, or all of a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Session(SessionId, UserId),
    User(UserId),
}

pub(crate) struct SharedSessions {
    client: Arc<Client>,
    gate: Arc<RedisGate>,
    prefix: String,
    get: Script,
    put: Script,
    end: Script,
    is_listening: AtomicBool,
    /// Incremented with every subscription, before which messages were missed, and whenever the cache is cleared.
    subscriptions: AtomicU64,
    /// Ends that could not be written.
    unwritten: Mutex<Vec<Ended>>,
}

/// What Redis holds about a session.
enum StoredSession {
    Open(Session),
    Ended,
    /// The ledger decides.
    Unknown,
}

impl SharedSessions {
    pub(crate) fn new(client: Arc<Client>, gate: Arc<RedisGate>, ledger_id: &str) -> Self {
        Self {
            client,
            gate,
            prefix: format!("stampede:{ledger_id}:session"),
            get: Script::new(include_str!("shared_sessions/get.lua")),
            put: Script::new(include_str!("shared_sessions/put.lua")),
            end: Script::new(include_str!("shared_sessions/end.lua")),
            is_listening: AtomicBool::new(false),
            subscriptions: AtomicU64::new(0),
            unwritten: Mutex::default(),
        }
    }

    /// The channel of ended sessions.
    pub(crate) fn channel(&self) -> String {
        format!("{}s", self.prefix)
    }

    /// Whether every end of a session since the last subscription has arrived, or will. Not while Redis does not publish.
    pub(crate) fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Acquire) && self.gate.accepts_writes()
    }

    /// The number of the present subscription. What was read under an earlier one must not be cached.
    pub(crate) fn subscription(&self) -> u64 {
        self.subscriptions.load(Ordering::Acquire)
    }

    /// A subscription has begun. `clear` clears the cache of this process.
    pub(crate) fn subscribed(&self, clear: impl FnOnce()) {
        self.forget(clear);
        self.is_listening.store(true, Ordering::Release);
    }

    /// What this process has cached may be wrong. `clear` clears the cache; what is being read now is not cached either.
    pub(crate) fn forget(&self, clear: impl FnOnce()) {
        self.subscriptions.fetch_add(1, Ordering::AcqRel);
        clear();
    }

    pub(crate) fn disconnected(&self) {
        self.is_listening.store(false, Ordering::Release);
    }

    /// The keys of the copy, of its end, and of the revocation of all sessions of its user.
    fn keys(&self, id: SessionId, user: UserId) -> [String; 3] {
        let copy = format!("{}:{}:{}", self.prefix, self.gate.incarnation(), hex(id));
        [copy, self.ended_key(id), self.revoked_key(user)]
    }

    fn ended_key(&self, id: SessionId) -> String {
        format!("{}:ended:{}", self.prefix, hex(id))
    }

    fn revoked_key(&self, user: UserId) -> String {
        format!("{}:revoked:{user}", self.prefix)
    }

    /// The session of this user, from its copy or from the ledger. `None` if it has ended or expired.
    pub(crate) async fn read(
        &self,
        accounts: &dyn Accounts,
        id: SessionId,
        user: UserId,
        now: Timestamp,
    ) -> Result<Option<Session>, LedgerError> {
        // The same keys for the whole look-up: if the incarnation changes meanwhile, the copy is one of the earlier time.
        let keys = self.keys(id, user);
        if !self.gate.is_answering() || !self.gate.accepts_writes() {
            return accounts.session(id, now).await;
        }
        match self.get(&keys, id).await {
            Ok(StoredSession::Open(session)) if session.expires_at > now => return Ok(Some(session)),
            Ok(StoredSession::Ended) => return Ok(None),
            Ok(StoredSession::Open(_) | StoredSession::Unknown) => {}
            Err(error) => tracing::debug!(%error, "cannot read a session from Redis; asking the ledger"),
        }
        let Some(session) = accounts.session(id, now).await? else { return Ok(None) };
        hit_on_another_thread("session.loaded", "").await;
        match self.put(&keys, &session, now).await {
            Ok(true) => Ok(Some(session)),
            Ok(false) => Ok(None),
            Err(error) => {
                tracing::debug!(%error, "cannot copy a session to Redis");
                Ok(Some(session))
            }
        }
    }

    async fn get(&self, keys: &[String; 3], id: SessionId) -> Result<StoredSession, CommandError> {
        let [copy, ended, revoked] = keys.clone();
        let keys = [copy, ended, revoked, format!("{}:writable", self.prefix)];
        let args = [WRITABLE_TTL.as_millis().to_string()];
        let (copy, ended, revoked): (Option<String>, Option<String>, Option<String>) =
            read(self.client.eval(&self.get, &keys, &args).await?)?;
        Ok(match copy.as_deref().and_then(|copy| parse(copy, id)) {
            _ if ended.is_some() => StoredSession::Ended,
            Some(session) if revoked.is_none() => StoredSession::Open(session),
            _ => StoredSession::Unknown,
        })
    }

    /// Copies a session that the ledger has. `false` if it has ended since.
    async fn put(&self, keys: &[String; 3], session: &Session, now: Timestamp) -> Result<bool, CommandError> {
        let ttl_ms = (session.expires_at.min(now.plus(COPY_TTL)).ms() - now.ms()).max(1);
        let args = [format_copy(session), ttl_ms.to_string()];
        let is_open: i64 = read(self.client.eval(&self.put, keys, &args).await?)?;
        Ok(is_open == 1)
    }

    /// Copies new sessions. Without a copy, a session is read from the ledger.
    pub(crate) async fn put_new(&self, sessions: &[Session], now: Timestamp) {
        futures_util::stream::iter(sessions)
            .for_each_concurrent(CONCURRENT_WRITES, |session| async move {
                if let Err(error) = self.put(&self.keys(session.id, session.user), session, now).await {
                    tracing::debug!(%error, "cannot copy a session to Redis");
                }
            })
            .await;
    }

    /// Ends sessions on all nodes. They have ended in the ledger. What cannot be written is written by
    /// [`write_again`](Self::write_again).
    pub(crate) async fn end(&self, ended: Vec<Ended>) -> Result<(), CommandError> {
        let done = match self.write(&ended).await {
            Ok(()) => return Ok(()),
            // No copy is used meanwhile, so the caches are all that has to be cleared.
            Err(error) if error.is_write_refusal() || matches!(error, CommandError::Refused(_)) => {
                self.publish(&ended).await
            }
            Err(error) => Err(error),
        };
        let mut unwritten = self.unwritten.lock();
        unwritten.extend(ended);
        let excess = unwritten.len().saturating_sub(MAX_UNWRITTEN);
        unwritten.drain(..excess);
        done
    }

    /// Writes and publishes ends, in one step.
    async fn write(&self, ended: &[Ended]) -> Result<(), CommandError> {
        if ended.is_empty() {
            return Ok(());
        }
        let key = |ended: &Ended| match ended {
            Ended::Session(id, _) => self.ended_key(*id),
            Ended::User(user) => self.revoked_key(*user),
        };
        let keys: Vec<String> = ended.iter().map(key).collect();
        let mut args = vec![self.channel(), ENDED_TTL.as_millis().to_string()];
        args.extend(ended.iter().map(Ended::message));
        self.client.eval(&self.end, &keys, &args).await.map(drop)
    }

    /// Publishes ends. Redis also does this while it refuses writes.
    async fn publish(&self, ended: &[Ended]) -> Result<(), CommandError> {
        for ended in ended {
            let mut command = redis::cmd("PUBLISH");
            command.arg(self.channel()).arg(ended.message());
            self.client.send(command).await?;
        }
        Ok(())
    }

    /// Writes ends that could not be written.
    pub(crate) async fn write_again(&self) {
        let ended = std::mem::take(&mut *self.unwritten.lock());
        if let Err(error) = self.write(&ended).await {
            tracing::warn!(%error, sessions = ended.len(), "cannot tell the other nodes of ended sessions; trying again");
            self.unwritten.lock().extend(ended);
        }
    }
}

impl Ended {
    /// The message about it on the channel.
    fn message(&self) -> String {
        match self {
            Self::Session(id, user) => format!("{} {user}", hex(*id)),
            Self::User(user) => format!("all {user}"),
        }
    }
}

fn hex(SessionId(id): SessionId) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

/// What a message on the channel says.
pub(crate) fn parse_message(message: &[u8]) -> Option<Ended> {
    let (id, user) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    let user = user.parse().ok()?;
    if id == "all" {
        return Some(Ended::User(user));
    }
    let id = u128::from_str_radix(id, 16).ok().filter(|_| id.len() == 32)?;
    Some(Ended::Session(SessionId(id.to_be_bytes()), user))
}

fn format_copy(session: &Session) -> String {
    format!("{} {} {}", session.user, session.created_at.ms(), session.expires_at.ms())
}

fn parse(copy: &str, id: SessionId) -> Option<Session> {
    let mut words = copy.split(' ');
    let user = words.next()?.parse().ok()?;
    let mut time = || Some(Timestamp::from_ms(words.next()?.parse().ok()?));
    Some(Session { id, user, created_at: time()?, expires_at: time()? })
}

fn read<T: redis::FromRedisValue>(reply: redis::Value) -> Result<T, CommandError> {
    T::from_redis_value(reply).map_err(|error| CommandError::Unknown(error.into()))
}

impl fmt::Debug for SharedSessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSessions").field("is_listening", &self.is_listening).finish_non_exhaustive()
    }
}
