//! Users, their sessions and their login codes.

use std::fmt;
use std::net::IpAddr;

use async_trait::async_trait;

use super::{Fence, Fenced, Result};
use crate::clock::Timestamp;
use crate::ids::UserId;
use crate::user::{Phone, User};

/// The name of a session: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionId(…)")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub user: UserId,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// The name of one request for a login code: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChallengeId(pub [u8; 16]);

impl fmt::Debug for ChallengeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChallengeId(…)")
    }
}

/// A login code that was sent. Tries are bound to it, so that guesses at one challenge do not touch another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    pub id: ChallengeId,
    pub phone: Phone,
    /// The address that requested it, or its network of 64 bits.
    pub address: IpAddr,
    /// A keyed hash of the code.
    pub code_mac: Vec<u8>,
    /// How long the code is.
    pub digits: u32,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// Which challenge of a phone a code is meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChallengeSelector {
    Id(ChallengeId),
    /// The newest one that was requested from this address.
    NewestFrom(IpAddr),
}

/// The result of a login with the right code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogInOutcome {
    /// The session is open. `ended` are the user's oldest sessions, which had to end because there were too many.
    Done { user: User, ended: Vec<SessionId> },
    /// Another login has consumed the challenge.
    Used,
    /// The account is disabled. The challenge is consumed.
    Disabled,
}

/// A user as an administrator sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub user: User,
    pub created_at: Timestamp,
    pub disabled: bool,
}

/// What came of disabling or enabling an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disabled {
    /// Was it disabled before?
    pub was: bool,
    pub ended: Vec<SessionId>,
}

/// Users, their login codes and their sessions.
///
/// Every transaction about a phone's challenges locks the phone's row first, and every transaction that opens a session or ends
/// all of a user's sessions locks the user's row.
#[async_trait]
pub trait Accounts: Send + Sync + fmt::Debug {
    /// The secret of this name. If there is none, `fresh` is stored and returned.
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>>;

    /// Tries at codes of this phone since its last login, over all its challenges.
    async fn login_failures(&self, phone: &Phone) -> Result<u32>;

    /// Stores a challenge. A phone has at most `max_live` of them: beyond that the oldest of the address that has the most ends,
    /// so that one address cannot push out another's.
    async fn put_challenge(&self, challenge: &Challenge, max_live: usize) -> Result<()>;

    /// Counts one try at a challenge of this phone, *then* returns it to be compared: concurrent guesses compare at most
    /// `max_tries`. `None` if there is no such challenge, or it has expired or was tried that often.
    async fn try_challenge(
        &self,
        phone: &Phone,
        which: ChallengeSelector,
        max_tries: u32,
        now: Timestamp,
    ) -> Result<Option<Challenge>>;

    /// Consumes the challenge and opens a session, for `newcomer` if the phone is new. The phone's failure count is reset. A user
    /// has at most `max_sessions`; the oldest end.
    async fn log_in(
        &self,
        challenge: ChallengeId,
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        max_sessions: usize,
        now: Timestamp,
    ) -> Result<LogInOutcome>;

    /// Opens a session for each of these users, without a code; users that do not exist are created. Returns their ids, in the
    /// same order.
    async fn open_sessions(
        &self,
        users: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>>;

    async fn user(&self, id: UserId) -> Result<Option<User>>;

    async fn account(&self, id: UserId) -> Result<Option<Account>>;

    async fn account_of(&self, phone: &Phone) -> Result<Option<Account>>;

    /// Disables the account and ends its sessions, or enables it again; `None` if there is no such user.
    async fn set_disabled(&self, user: UserId, disabled: bool) -> Result<Option<Disabled>>;

    async fn session(&self, id: SessionId, now: Timestamp) -> Result<Option<Session>>;

    /// Moves the expiry of sessions that still exist.
    async fn touch_sessions(&self, sessions: &[Session]) -> Result<()>;

    /// The user's sessions that have not expired, newest first.
    async fn sessions_of(&self, user: UserId, now: Timestamp) -> Result<Vec<Session>>;

    /// Ends the user's own session; `false` if there is none of this name.
    async fn end_session(&self, user: UserId, id: SessionId) -> Result<bool>;

    /// Ends all sessions of the user, and returns them; `None` if there is no such user.
    async fn end_sessions(&self, user: UserId) -> Result<Option<Vec<SessionId>>>;

    /// Deletes challenges and sessions that have expired. Returns how many.
    async fn delete_expired(&self, fence: Option<Fence>, now: Timestamp) -> Result<Fenced<u64>>;
}
