//! Sessions and accounts.
//!
//! A session is looked up in a bounded cache first and in the ledger on a miss, in tiers with Redis in between there
//! ([`crate::shared_sessions`]). Each use moves its expiry, up to a fixed lifetime.
//! The new expiry is written in the background, in batches, so that a request costs no write. Sessions that the ledger does not
//! have are cached for a while, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use metrics::{Counter, counter};
use rand::RngExt as _;
use stampede_core::ports::{Account, Accounts, Disabled, LedgerError, Session, SessionId};
use stampede_core::{Clock, Code, Phone, Timestamp, User, UserId};
use stampede_limit::Counters;
use tokio::sync::{Semaphore, mpsc};

use crate::audit::{Change, Outcome};
use crate::engine::Engine;
use crate::error::Error;
use crate::failpoints::hit_on_another_thread;
use crate::login::Sender;
use crate::proof_of_work::ProofOfWork;
use crate::send_budget::{SendBudgets, SendLimiter};
use crate::sessions::Sessions;
use crate::shared_sessions::{Ended, SharedSessions};
use crate::token::{SessionKeys, TokenSigner};

#[derive(Debug, Clone, Copy)]
pub struct AuthConfig {
    /// A session ends this long after its last use.
    pub session_ttl: Duration,
    /// A session ends this long after its login, however often it is used.
    pub session_lifetime: Duration,
    /// How many sessions a user has at most; the oldest end.
    pub max_sessions: usize,
    /// How many sessions are kept in memory.
    pub session_memory: u64,
    /// The keys that sign tokens; if `None`, a key stored in the ledger.
    pub session_keys: Option<SessionKeys>,
    pub code_ttl: Duration,
    /// How often one code may be tried.
    pub code_tries: u32,
    pub budgets: SendBudgets,
    /// How hard the puzzle before a code is, in bits; 0: none.
    pub proof_of_work_bits: u8,
    /// Show the code in the answer. Only for a demonstration on this machine.
    pub show_codes: bool,
}

#[derive(Debug)]
pub(crate) struct CachedSession {
    user: UserId,
    created_at: Timestamp,
    expires_at_ms: AtomicI64,
    /// The expiry that is in the ledger, or is being written.
    written_ms: AtomicI64,
    /// When the ledger last confirmed that it exists.
    checked_ms: AtomicI64,
    /// Ended explicitly, whatever its expiry.
    ended: bool,
}

impl CachedSession {
    /// Whether it is a session of this user that is not known to have ended.
    pub(crate) fn is_open_for(&self, user: UserId) -> bool {
        self.user == user && !self.ended
    }

    /// A session that has ended explicitly.
    pub(crate) fn ended(user: UserId, now: Timestamp) -> Self {
        let at_ms = || AtomicI64::new(now.ms());
        let (expires_at_ms, written_ms, checked_ms) = (at_ms(), at_ms(), at_ms());
        Self { user, created_at: now, expires_at_ms, written_ms, checked_ms, ended: true }
    }

    /// Whether it ended some time ago. A session that has just ended stays cached, so that a request that read it from the ledger
    /// before cannot bring it back.
    pub(crate) fn is_long_over(&self, now: Timestamp) -> bool {
        self.expires_at_ms.load(Ordering::Relaxed) < now.minus(Duration::from_secs(60)).ms()
    }
}

/// In tiers with Redis, a cached session is compared with Redis this often, in case the message of its end was lost.
const CHECK_SHARED_MS: i64 = 60_000;
/// Where other processes can end a session, the ledger is asked again this often.
const CHECK_EVERY_MS: i64 = 2_000;
/// How many sessions at once are read from the ledger for requests that do not wait for it.
const MAX_LOOKUPS: usize = 64;

/// A token whose signature is right. Whether its session is open is not known yet.
#[derive(Debug, Clone, Copy)]
pub struct VerifiedToken {
    pub user: UserId,
    pub session: SessionId,
}

#[derive(Debug)]
pub(crate) struct Auth {
    pub(crate) config: AuthConfig,
    pub(crate) accounts: Arc<dyn Accounts>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) token_signer: TokenSigner,
    pub(crate) sender: Option<Arc<dyn Sender>>,
    pub(crate) budgets: SendLimiter,
    pub(crate) proof_of_work: ProofOfWork,
    sessions: Arc<Sessions<CachedSession>>,
    /// In tiers with Redis.
    pub(crate) shared: Option<Arc<SharedSessions>>,
    /// Sessions whose new expiry is to be written.
    used_sessions: mpsc::Sender<Session>,
    lookups: Arc<Semaphore>,
    /// Counts look-ups of sessions in the ledger.
    lookup_count: Counter,
}

impl Auth {
    /// Also returns the sessions whose new expiry is to be written. `key` is the ledger's, for when the settings have none.
    pub(crate) fn new(
        config: AuthConfig,
        accounts: Arc<dyn Accounts>,
        clock: Arc<dyn Clock>,
        key: [u8; 32],
        sender: Option<Arc<dyn Sender>>,
        counters: &Counters,
    ) -> (Self, mpsc::Receiver<Session>) {
        let (used_sessions, to_write) = mpsc::channel(10_000);
        let keys = config.session_keys.unwrap_or(SessionKeys { current: key, previous: None });
        let auth = Self {
            config,
            accounts,
            clock,
            token_signer: TokenSigner::new(&keys.current, keys.previous.as_ref()),
            sender,
            // The ledger's key never changes, so no counter is lost with a new session key.
            budgets: SendLimiter::new(config.budgets, counters, TokenSigner::new(&key, None)),
            proof_of_work: ProofOfWork::new(config.proof_of_work_bits, counters),
            sessions: Arc::new(Sessions::new(config.session_memory)),
            shared: None,
            used_sessions,
            lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)),
            lookup_count: counter!("stampede_session_lookups_total"),
        };
        auth.lookup_count.increment(0);
        (auth, to_write)
    }

    /// When a session that was opened then and is used now expires.
    pub(crate) fn expiry(&self, created_at: Timestamp, now: Timestamp) -> Timestamp {
        now.plus(self.config.session_ttl).min(created_at.plus(self.config.session_lifetime))
    }

    /// When a session of the ledger expires. The lifetime may have been shortened since it was written.
    fn latest_expiry(&self, session: &Session) -> Timestamp {
        session.expires_at.min(session.created_at.plus(self.config.session_lifetime))
    }

    /// Caches a session. `subscription`: that of [`SharedSessions`] under which it was read.
    pub(crate) fn remember(&self, session: Session, subscription: u64, now: Timestamp) -> Arc<CachedSession> {
        let expires_at_ms = self.latest_expiry(&session).ms();
        let known = Arc::new(CachedSession {
            user: session.user,
            created_at: session.created_at,
            expires_at_ms: AtomicI64::new(expires_at_ms),
            written_ms: AtomicI64::new(expires_at_ms),
            checked_ms: AtomicI64::new(now.ms()),
            ended: false,
        });
        // An entry that is there is not replaced: the session may have ended since it was read.
        let cached = self.sessions.get_or_put(session.id, known);
        if subscription != self.subscription() {
            // Its end may have been missed. Compared after the entry was made: the cache is cleared after the number has changed.
            self.sessions.remove(session.id);
        }
        cached
    }

    pub(crate) fn subscription(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.subscription())
    }

    /// The session in memory. Where other nodes end sessions, it counts only while their messages arrive.
    fn cached(&self, id: SessionId) -> Option<Arc<CachedSession>> {
        let is_listening = self.shared.as_ref().is_none_or(|shared| shared.is_listening());
        self.sessions.get(id).filter(|known| known.ended || is_listening)
    }

    /// Caches sessions that this process has opened, and copies them to Redis for the other nodes.
    pub(crate) async fn share_new(&self, sessions: &[Session], now: Timestamp) {
        for session in sessions {
            self.remember(*session, self.subscription(), now);
        }
        if let Some(shared) = &self.shared {
            shared.put_new(sessions, now).await;
        }
    }

    pub(crate) fn sessions(&self) -> Arc<Sessions<CachedSession>> {
        self.sessions.clone()
    }

    /// Every session is read from the ledger again when it is next used.
    pub(crate) fn invalidate_all(&self) {
        self.sessions.retain(|_| false);
    }

    /// Caches that the session has ended, so that a request that has just read it from the ledger cannot bring it back, and
    /// further requests with its token do not reach the ledger.
    fn mark_ended(&self, id: SessionId, user: UserId) {
        self.sessions.put(id, Arc::new(CachedSession::ended(user, self.clock.now())));
    }

    /// Ends sessions that have ended in the ledger on all nodes.
    pub(crate) async fn end_everywhere(&self, sessions: &[SessionId], user: UserId) -> Result<(), Error> {
        sessions.iter().for_each(|&id| self.mark_ended(id, user));
        self.tell(sessions.iter().map(|&id| Ended::Session(id, user)).collect()).await
    }

    /// Ends all sessions of a user on all nodes, also those that ended in the ledger before, and of which a node was not told.
    async fn end_all_everywhere(&self, sessions: &[SessionId], user: UserId) -> Result<(), Error> {
        sessions.iter().for_each(|&id| self.mark_ended(id, user));
        if let Some(shared) = &self.shared {
            shared.forget(|| self.sessions.retain(|known| !known.is_open_for(user)));
        }
        let ended = sessions.iter().map(|&id| Ended::Session(id, user));
        self.tell(ended.chain([Ended::User(user)]).collect()).await
    }

    async fn tell(&self, ended: Vec<Ended>) -> Result<(), Error> {
        if let Some(shared) = &self.shared
            && let Err(error) = shared.end(ended).await
        {
            tracing::warn!(%error, "cannot tell the other nodes of ended sessions; trying again");
            return Err(Error::OutcomeUnknown);
        }
        Ok(())
    }

    async fn read(&self, proven: VerifiedToken, now: Timestamp) -> Result<Option<Session>, Error> {
        self.lookup_count.increment(1);
        let session = match &self.shared {
            Some(shared) => shared.read(self.accounts.as_ref(), proven.session, proven.user, now).await?,
            None => self.accounts.session(proven.session, now).await?,
        };
        match &session {
            Some(_) => hit_on_another_thread("session.found", "").await,
            None => self.mark_ended(proven.session, proven.user),
        }
        Ok(session)
    }

    /// Moves the expiry, and has it written once it has moved by a thirtieth of the session's life.
    fn extend_expiry(&self, id: SessionId, known: &CachedSession, now: Timestamp) {
        let expires_at = self.expiry(known.created_at, now);
        known.expires_at_ms.fetch_max(expires_at.ms(), Ordering::Relaxed);
        let written_ms = known.written_ms.load(Ordering::Relaxed);
        let worth_writing = Timestamp::from_ms(written_ms).plus(self.config.session_ttl / 30) <= expires_at;
        let claim =
            |to| known.written_ms.compare_exchange(written_ms, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if worth_writing && claim(expires_at.ms()) {
            // If the queue is full, the next use of the session tries again.
            let session = Session { id, user: known.user, created_at: known.created_at, expires_at };
            if self.used_sessions.try_send(session).is_err() {
                known.written_ms.store(written_ms, Ordering::Relaxed);
            }
        }
    }
}

impl Engine {
    /// Sessions for the test buyers `first..first + count`, without codes: only for load tests. Each with its token.
    pub async fn open_test_sessions(&self, first: u32, count: u32) -> Result<Vec<(UserId, String)>, Error> {
        let auth = &self.auth;
        let now = auth.clock.now();
        let expires_at = auth.expiry(now, now);
        let tester = |n: u32| {
            let phone = Phone::parse(&format!("199{n:08}")).map_err(|_| Error::Plain(Code::InvalidRequest))?;
            Ok::<_, Error>(User { id: self.next_id(UserId::new)?, phone, nickname: format!("tester_{n}") })
        };
        let testers = (first..first.saturating_add(count)).map(tester).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<SessionId> = testers.iter().map(|_| SessionId(rand::rng().random())).collect();
        let users = auth.accounts.open_sessions(&testers, &ids, expires_at, now).await?;
        let session = |(id, user)| Session { id, user, created_at: now, expires_at };
        let sessions: Vec<Session> = ids.into_iter().zip(users).map(session).collect();
        auth.share_new(&sessions, now).await;
        let token = |session: &Session| (session.user, auth.token_signer.token(session.id, session.user));
        Ok(sessions.iter().map(token).collect())
    }

    /// Checks the token's signature. A forged token, and one whose session is known to have ended, is refused without asking the
    /// ledger, and does not count against the limits of its user. Those, as far as this process counts, are checked after this and before
    /// [`Engine::authenticate`], which may ask the ledger.
    pub fn verify_token(&self, token: &str) -> Result<VerifiedToken, Error> {
        let (session, user) = self.auth.token_signer.open(token).ok_or(Error::Plain(Code::Unauthorized))?;
        match self.auth.sessions.get(session) {
            Some(known) if known.ended => Err(Error::Plain(Code::Unauthorized)),
            _ => Ok(VerifiedToken { user, session }),
        }
    }

    /// Checks that the session is open, and moves its expiry.
    pub async fn authenticate(&self, proven: VerifiedToken) -> Result<UserId, Error> {
        let auth = &self.auth;
        let VerifiedToken { user, session: id } = proven;
        let refused = Error::Plain(Code::Unauthorized);
        let now = auth.clock.now();
        let subscription = auth.subscription();
        let known = match auth.cached(id) {
            Some(known) => known,
            None => match auth.read(proven, now).await? {
                Some(session) => auth.remember(session, subscription, now),
                None => return Err(refused),
            },
        };
        if known.ended || known.user != user {
            return Err(refused);
        }
        let unchecked_ms = now.ms() - known.checked_ms.load(Ordering::Relaxed);
        let must_check = match auth.shared {
            // Another node may have moved its expiry, or have died before it could tell of the end.
            Some(_) => known.expires_at_ms.load(Ordering::Relaxed) <= now.ms() || unchecked_ms >= CHECK_SHARED_MS,
            None => self.has_others.load(Ordering::Relaxed) && unchecked_ms >= CHECK_EVERY_MS,
        };
        if must_check {
            let Some(session) = auth.read(proven, now).await? else { return Err(refused) };
            // Another process may have moved its expiry.
            known.expires_at_ms.fetch_max(auth.latest_expiry(&session).ms(), Ordering::Relaxed);
            known.checked_ms.store(now.ms(), Ordering::Relaxed);
        }
        if known.expires_at_ms.load(Ordering::Relaxed) <= now.ms() {
            return Err(refused);
        }
        auth.extend_expiry(id, &known, now);
        Ok(user)
    }

    /// Moves the expiry of a session that requested a public page. Never waits for the ledger: returns `false` if the session is
    /// not cached; [`Engine::look_up`] then loads it.
    pub fn refresh(&self, proven: VerifiedToken) -> bool {
        let (auth, now) = (&self.auth, self.auth.clock.now());
        let Some(known) = auth.cached(proven.session) else { return false };
        if !known.ended && known.expires_at_ms.load(Ordering::Relaxed) > now.ms() {
            auth.extend_expiry(proven.session, &known, now);
        }
        true
    }

    /// Reads the session from the ledger in the background, unless many sessions are being read.
    pub fn look_up(self: &Arc<Self>, proven: VerifiedToken) {
        let Ok(permit) = self.auth.lookups.clone().try_acquire_owned() else { return };
        let engine = self.clone();
        tokio::spawn(async move {
            if let Err(error) = engine.authenticate(proven).await {
                // The page was public; the next request that needs the session fails.
                tracing::debug!(%error, "a session was not refreshed");
            }
            drop(permit);
        });
    }

    /// Ends the session of this token, at once.
    pub async fn log_out(&self, token: &str) -> Result<(), Error> {
        let (session, user) = self.auth.token_signer.open(token).ok_or(Error::Plain(Code::Unauthorized))?;
        self.end_session(user, session).await
    }

    /// Ends the user's own session, at once.
    pub async fn end_session(&self, user: UserId, id: SessionId) -> Result<(), Error> {
        // The ledger first: a session removed from the cache alone would be loaded again.
        let ended = self.auth.accounts.end_session(user, id).await;
        let ended = self.invalidate_all_on_error(ended)?;
        if ended || self.auth.sessions.get(id).is_some_and(|known| known.user == user) {
            self.auth.end_everywhere(&[id], user).await?;
        }
        if ended { Ok(()) } else { Err(Error::Plain(Code::NoSuchSession)) }
    }

    /// Ends all sessions of the user, at once.
    pub async fn end_sessions(&self, user: UserId) -> Result<Outcome<()>, Error> {
        let ended = self.auth.accounts.end_sessions(user).await;
        let ended = self.invalidate_all_on_error(ended)?.ok_or(Error::Plain(Code::NoSuchUser))?;
        self.auth.end_all_everywhere(&ended, user).await?;
        Ok(Outcome::done((), vec![Change::new("sessions", ended.len(), 0)]))
    }

    /// A disabled account has no sessions and cannot log in.
    pub async fn set_disabled(&self, user: UserId, disabled: bool) -> Result<Outcome<Account>, Error> {
        let done = self.auth.accounts.set_disabled(user, disabled).await;
        let Disabled { was, ended } = self.invalidate_all_on_error(done)?.ok_or(Error::Plain(Code::NoSuchUser))?;
        self.auth.end_all_everywhere(&ended, user).await?;
        let account = self.account(user).await?;
        if was == disabled {
            return Ok(Outcome::unchanged(account));
        }
        Ok(Outcome::done(account, vec![Change::new("disabled", was, disabled)]))
    }

    /// If the ledger did not answer, sessions may have ended there, so none may stay cached here.
    fn invalidate_all_on_error<T>(&self, ended: Result<T, LedgerError>) -> Result<T, Error> {
        ended.map_err(|error| {
            self.auth.invalidate_all();
            error.into()
        })
    }

    /// The user's sessions, newest first.
    pub async fn sessions(&self, user: UserId) -> Result<Vec<Session>, Error> {
        Ok(self.auth.accounts.sessions_of(user, self.auth.clock.now()).await?)
    }

    pub async fn user(&self, id: UserId) -> Result<User, Error> {
        self.auth.accounts.user(id).await?.ok_or(Error::Plain(Code::Unauthorized))
    }

    pub async fn account(&self, id: UserId) -> Result<Account, Error> {
        self.auth.accounts.account(id).await?.ok_or(Error::Plain(Code::NoSuchUser))
    }

    pub async fn account_of(&self, phone: &Phone) -> Result<Account, Error> {
        self.auth.accounts.account_of(phone).await?.ok_or(Error::Plain(Code::NoSuchUser))
    }
}
