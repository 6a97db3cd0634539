//! Login by a code sent to the phone, and sessions.
//!
//! A session is looked up in a bounded local memory first and in the ledger on a miss. Its expiry slides with every use; the
//! new expiry is written behind, in batches, so that being logged in costs a request no write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rand::RngExt as _;
use stampede_core::ports::{Accounts, CodeTry, Session, SessionId};
use stampede_core::{Clock, Code, Phone, Timestamp, User, UserId};
use stampede_limit::{Limit, SlidingWindow};
use subtle::ConstantTimeEq as _;
use tokio::sync::mpsc;

use crate::engine::Engine;
use crate::error::Error;
use crate::sessions::Sessions;
use crate::token::Sealer;

/// Brings a login code to its phone.
#[async_trait]
pub trait Sender: Send + Sync + fmt::Debug {
    async fn send(&self, phone: &Phone, code: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

#[derive(Debug, Clone, Copy)]
pub struct PeopleConfig {
    pub session_ttl: Duration,
    /// How many sessions are kept in memory.
    pub session_memory: u64,
    pub code_ttl: Duration,
    /// How often one code may be tried.
    pub code_tries: u32,
    pub codes_per_phone: Limit,
    /// How many numbers the limits remember.
    pub limit_memory: usize,
    /// Show the code in the answer. Only for a demonstration on this machine.
    pub show_codes: bool,
}

#[derive(Debug)]
pub struct CodeSent {
    pub expires_in: Duration,
    /// Only in a demonstration.
    pub shown: Option<String>,
}

#[derive(Debug)]
pub struct LoggedIn {
    pub token: String,
    pub user: User,
    pub expires_at: Timestamp,
}

#[derive(Debug)]
pub(crate) struct Known {
    user: UserId,
    expires_at_ms: AtomicI64,
    /// The expiry that the ledger knows, or will soon.
    written_ms: AtomicI64,
    /// When the ledger last said that it exists.
    checked_ms: AtomicI64,
    /// For good, whatever any clock says.
    ended: bool,
}

impl Known {
    /// Has it been over for a while? What has just ended stays, so that nobody brings it back who had read it before.
    pub(crate) fn is_long_over(&self, now: Timestamp) -> bool {
        self.expires_at_ms.load(Ordering::Relaxed) < now.minus(Duration::from_secs(60)).ms()
    }
}

/// With other processes about, a session may be ended there: so the ledger is asked again this often.
const CHECK_EVERY_MS: i64 = 2_000;

#[derive(Debug)]
pub(crate) struct People {
    config: PeopleConfig,
    accounts: Arc<dyn Accounts>,
    clock: Arc<dyn Clock>,
    sealer: Sealer,
    sender: Option<Arc<dyn Sender>>,
    sessions: Arc<Sessions<Known>>,
    touched: mpsc::Sender<Session>,
    codes_per_phone: SlidingWindow<Phone>,
}

impl People {
    /// Also returns the sessions whose new expiry is to be written.
    pub(crate) fn new(
        config: PeopleConfig,
        accounts: Arc<dyn Accounts>,
        clock: Arc<dyn Clock>,
        key: &[u8; 32],
        sender: Option<Arc<dyn Sender>>,
    ) -> (Self, mpsc::Receiver<Session>) {
        let sessions = Arc::new(Sessions::new(config.session_memory));
        let (touched, to_write) = mpsc::channel(10_000);
        let codes_per_phone = SlidingWindow::new(config.codes_per_phone, config.limit_memory);
        let sealer = Sealer::new(key);
        (Self { config, accounts, clock, sealer, sender, sessions, touched, codes_per_phone }, to_write)
    }

    fn remember(&self, session: Session, now: Timestamp) -> Arc<Known> {
        let expires_at_ms = session.expires_at.ms();
        let known = Arc::new(Known {
            user: session.user,
            expires_at_ms: AtomicI64::new(expires_at_ms),
            written_ms: AtomicI64::new(expires_at_ms),
            checked_ms: AtomicI64::new(now.ms()),
            ended: false,
        });
        // Not over what is there: it may have ended since it was read.
        self.sessions.get_or_put(session.id, known)
    }

    pub(crate) fn sessions(&self) -> Arc<Sessions<Known>> {
        self.sessions.clone()
    }

    /// Every session is read from the ledger again when it is next used.
    pub(crate) fn forget_all(&self) {
        self.sessions.retain(|_| false);
    }

    /// What stays is that it has ended, so that a request that has just read it from the ledger cannot bring it back.
    fn forget(&self, id: SessionId, user: UserId) {
        let now = || AtomicI64::new(self.clock.now().ms());
        let ended = Known { user, expires_at_ms: now(), written_ms: now(), checked_ms: now(), ended: true };
        self.sessions.put(id, Arc::new(ended));
    }

    /// Moves the expiry, and has it written once it has moved by a thirtieth of the session's life.
    fn slide(&self, id: SessionId, known: &Known, now: Timestamp) {
        let expires_at = now.plus(self.config.session_ttl);
        known.expires_at_ms.fetch_max(expires_at.ms(), Ordering::Relaxed);
        let written_ms = known.written_ms.load(Ordering::Relaxed);
        let worth_writing = Timestamp::from_ms(written_ms).plus(self.config.session_ttl / 30) <= expires_at;
        let claim =
            |to| known.written_ms.compare_exchange(written_ms, to, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if worth_writing && claim(expires_at.ms()) {
            // If the queue is full, the next use of the session tries again.
            let session = Session { id, user: known.user, created_at: now, expires_at };
            if self.touched.try_send(session).is_err() {
                known.written_ms.store(written_ms, Ordering::Relaxed);
            }
        }
    }
}

impl Engine {
    /// Sends a login code, unless this number has had enough of them.
    pub async fn send_code(&self, phone: &Phone) -> Result<CodeSent, Error> {
        let people = &self.people;
        people.codes_per_phone.check(phone.clone()).map_err(|wait| Error::Limited { wait })?;
        let Some(sender) = &people.sender else { return Err(Error::Plain(Code::Unavailable)) };
        let code = format!("{:06}", rand::rng().random_range(0..1_000_000));
        let expires_at = people.clock.now().plus(people.config.code_ttl);
        people.accounts.put_code(phone, &people.sealer.code(phone.as_str(), &code), expires_at).await?;
        sender.send(phone, &code).await.map_err(Error::Sender)?;
        Ok(CodeSent { expires_in: people.config.code_ttl, shown: people.config.show_codes.then_some(code) })
    }

    /// Opens a session for who knows the code. The first login makes the user.
    pub async fn log_in(&self, phone: Phone, code: &str) -> Result<LoggedIn, Error> {
        let people = &self.people;
        let now = people.clock.now();
        let seal = people.sealer.code(phone.as_str(), code);
        // The try is counted before anything is compared.
        let right = match people.accounts.try_code(&phone, people.config.code_tries, now).await? {
            CodeTry::Seal(kept) => bool::from(kept.ct_eq(&seal)),
            CodeTry::NoCode => false,
            CodeTry::Wait(wait) => return Err(Error::Limited { wait }),
        };
        if !right {
            return Err(Error::Plain(Code::WrongCode));
        }
        let nickname = format!("user_{:08x}", rand::rng().random::<u32>());
        let newcomer = User { id: self.next_id(UserId::new)?, phone, nickname };
        let id = SessionId(rand::rng().random());
        let expires_at = now.plus(people.config.session_ttl);
        let user = people.accounts.log_in(&seal, &newcomer, id, expires_at, now).await?;
        let user = user.ok_or(Error::Plain(Code::WrongCode))?;
        people.remember(Session { id, user: user.id, created_at: now, expires_at }, now);
        Ok(LoggedIn { token: people.sealer.token(id, user.id), user, expires_at })
    }

    /// Sessions for the test buyers `first..first + count`, without codes: only for load tests. Each with its token.
    pub async fn open_test_sessions(&self, first: u32, count: u32) -> Result<Vec<(UserId, String)>, Error> {
        let people = &self.people;
        let now = people.clock.now();
        let expires_at = now.plus(people.config.session_ttl);
        let tester = |n: u32| {
            let phone = Phone::parse(&format!("199{n:08}")).map_err(|_| Error::Plain(Code::InvalidRequest))?;
            Ok::<_, Error>(User { id: self.next_id(UserId::new)?, phone, nickname: format!("tester_{n}") })
        };
        let testers = (first..first.saturating_add(count)).map(tester).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<SessionId> = testers.iter().map(|_| SessionId(rand::rng().random())).collect();
        let users = people.accounts.open_sessions(&testers, &ids, expires_at, now).await?;
        let open = |(id, user): (SessionId, UserId)| {
            people.remember(Session { id, user, created_at: now, expires_at }, now);
            (user, people.sealer.token(id, user))
        };
        Ok(ids.into_iter().zip(users).map(open).collect())
    }

    /// Whose session is it? Junk is refused without asking any store.
    pub async fn authenticate(&self, token: &str) -> Result<UserId, Error> {
        let people = &self.people;
        let refused = Error::Plain(Code::Unauthorized);
        let Some((id, user)) = people.sealer.open(token) else { return Err(refused) };
        let now = people.clock.now();
        let known = match people.sessions.get(id) {
            Some(known) => known,
            None => match people.accounts.session(id, now).await? {
                Some(session) => people.remember(session, now),
                None => return Err(refused),
            },
        };
        if known.ended || known.user != user {
            return Err(refused);
        }
        let checked_ms = known.checked_ms.load(Ordering::Relaxed);
        if self.has_others.load(Ordering::Relaxed) && now.ms() - checked_ms >= CHECK_EVERY_MS {
            if people.accounts.session(id, now).await?.is_none() {
                people.forget(id, user);
                return Err(refused);
            }
            known.checked_ms.store(now.ms(), Ordering::Relaxed);
        }
        if known.expires_at_ms.load(Ordering::Relaxed) <= now.ms() {
            return Err(refused);
        }
        people.slide(id, &known, now);
        Ok(user)
    }

    /// Ends the session of this token, at once.
    pub async fn log_out(&self, token: &str) -> Result<(), Error> {
        let Some((id, user)) = self.people.sealer.open(token) else { return Err(Error::Plain(Code::Unauthorized)) };
        self.end_session(user, id).await
    }

    /// Ends the user's own session, at once.
    pub async fn end_session(&self, user: UserId, id: SessionId) -> Result<(), Error> {
        // The ledger first: a session forgotten here alone would come back from there.
        let ended = self.people.accounts.end_session(user, id).await;
        // It is gone there, or perhaps gone: so it must not live on here. Whoever has it after all must show that by the ledger.
        match ended {
            Ok(ended) => {
                if ended || self.people.sessions.get(id).is_some_and(|known| known.user == user) {
                    self.people.forget(id, user);
                }
                if ended { Ok(()) } else { Err(Error::Plain(Code::NoSuchSession)) }
            }
            Err(error) => {
                self.people.forget_all();
                Err(error.into())
            }
        }
    }

    /// The user's sessions, newest first.
    pub async fn sessions(&self, user: UserId) -> Result<Vec<Session>, Error> {
        Ok(self.people.accounts.sessions_of(user, self.people.clock.now()).await?)
    }

    /// Which session is this token of?
    pub fn session_of(&self, token: &str) -> Option<SessionId> {
        self.people.sealer.open(token).map(|(id, _)| id)
    }

    pub async fn user(&self, id: UserId) -> Result<User, Error> {
        self.people.accounts.user(id).await?.ok_or(Error::Plain(Code::Unauthorized))
    }
}
