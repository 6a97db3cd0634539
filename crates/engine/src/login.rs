//! Login by a code sent to the phone.
//!
//! Every request for a code makes a challenge of its own, and tries are bound to it: guesses at one challenge neither use up nor
//! delay another. What bounds a guesser is the number of challenges (`send_budget`), five tries at each, and longer codes after
//! a hundred tries without a login.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;
use metrics::counter;
use rand::RngExt as _;
use stampede_core::ports::{Challenge, ChallengeId, ChallengeSelector, LogInOutcome, Session, SessionId};
use stampede_core::{Code, LONG_CODES_AFTER, Phone, Timestamp, User, UserId};
use stampede_limit::rate_limit_key;
use tokio::time::Instant;

use crate::engine::Engine;
use crate::error::Error;
use crate::proof_of_work::{Puzzle, Solution};

const DIGITS: u32 = 6;
const LONG_DIGITS: u32 = 10;
/// How many live challenges a phone has at most.
const MAX_LIVE: usize = 20;
/// A refused login is answered at a multiple of this time, so that its duration does not reveal whether there was a code to
/// compare with.
const REFUSAL_TIME_UNIT: Duration = Duration::from_millis(100);

/// Sends messages to phones.
#[async_trait]
pub trait Sender: Send + Sync + fmt::Debug {
    /// Sends a login code.
    async fn send(&self, phone: &Phone, code: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

    /// Sends a text to an operator.
    async fn send_text(&self, phone: &Phone, text: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

#[derive(Debug)]
pub struct CodeSent {
    /// The id of this request, to be sent back with the code.
    pub challenge: ChallengeId,
    pub expires_in: Duration,
    /// The code itself, only in demonstrations.
    pub shown: Option<String>,
}

#[derive(Debug)]
pub struct LoggedIn {
    pub token: String,
    pub user: User,
    pub expires_at: Timestamp,
}

impl Engine {
    /// A puzzle to be solved before a code is sent.
    pub fn puzzle(&self) -> Puzzle {
        let auth = &self.auth;
        auth.proof_of_work.puzzle(&auth.token_signer, auth.clock.now())
    }

    /// Sends a login code to the phone, requested from this address.
    pub async fn send_code(
        &self,
        phone: &Phone,
        address: IpAddr,
        solution: Option<Solution<'_>>,
    ) -> Result<CodeSent, Error> {
        let auth = &self.auth;
        if auth.sender.is_none() {
            return Err(Error::Plain(Code::Unavailable));
        }
        auth.proof_of_work.check(&auth.token_signer, phone, solution, auth.clock.now()).await?;
        auth.budgets.take(phone, address).await.map_err(|wait| Error::Limited { wait })?;
        let sent = self.send_challenge(phone, rate_limit_key(address)).await;
        if sent.is_err() {
            auth.budgets.undo(phone, address);
        }
        sent
    }

    async fn send_challenge(&self, phone: &Phone, address: IpAddr) -> Result<CodeSent, Error> {
        let auth = &self.auth;
        let Some(sender) = &auth.sender else { return Err(Error::Plain(Code::Unavailable)) };
        let failures = auth.accounts.login_failures(phone).await?;
        let digits = if failures >= LONG_CODES_AFTER { LONG_DIGITS } else { DIGITS };
        let number = rand::rng().random_range(0..10_u64.pow(digits));
        let code = format!("{number:0width$}", width = digits as usize);
        let (id, created_at) = (ChallengeId(rand::rng().random()), auth.clock.now());
        let code_mac = auth.token_signer.code(phone, id, &code).to_vec();
        let expires_at = created_at.plus(auth.config.code_ttl);
        let challenge = Challenge { id, phone: phone.clone(), address, code_mac, digits, created_at, expires_at };
        auth.accounts.put_challenge(&challenge, MAX_LIVE).await?;
        sender.send(phone, &code).await.map_err(Error::Sender)?;
        let shown = auth.config.show_codes.then_some(code);
        Ok(CodeSent { challenge: id, expires_in: auth.config.code_ttl, shown })
    }

    /// Opens a session for a caller who knows the code of this challenge, or else of the newest one that was requested from the same
    /// address. The first login creates the user.
    pub async fn log_in(
        &self,
        phone: Phone,
        code: &str,
        challenge: Option<ChallengeId>,
        address: IpAddr,
    ) -> Result<LoggedIn, Error> {
        let started = Instant::now();
        let which = challenge.map_or(ChallengeSelector::NewestFrom(rate_limit_key(address)), ChallengeSelector::Id);
        let done = self.use_code(phone, code, which).await;
        if matches!(done, Err(Error::Plain(Code::WrongCode))) {
            let steps = started.elapsed().as_millis() / REFUSAL_TIME_UNIT.as_millis() + 1;
            let steps = u32::try_from(steps).unwrap_or(u32::MAX);
            tokio::time::sleep_until(started + REFUSAL_TIME_UNIT.saturating_mul(steps)).await;
        }
        done
    }

    async fn use_code(&self, phone: Phone, code: &str, which: ChallengeSelector) -> Result<LoggedIn, Error> {
        let auth = &self.auth;
        let (now, config) = (auth.clock.now(), &auth.config);
        // The try is counted before anything is compared.
        let challenge = auth.accounts.try_challenge(&phone, which, config.code_tries, now).await?;
        let challenge = challenge.ok_or(Error::Plain(Code::WrongCode))?;
        counter!("stampede_login_tries_total", "digits" => challenge.digits.to_string()).increment(1);
        if !auth.token_signer.is_code(&phone, challenge.id, code, &challenge.code_mac) {
            return Err(Error::Plain(Code::WrongCode));
        }
        let nickname = format!("user_{:08x}", rand::rng().random::<u32>());
        let newcomer = User { id: self.next_id(UserId::new)?, phone, nickname };
        let (id, expires_at) = (SessionId(rand::rng().random()), auth.expiry(now, now));
        let accounts = &auth.accounts;
        let done = accounts.log_in(challenge.id, &newcomer, id, expires_at, config.max_sessions, now).await?;
        let (user, ended) = match done {
            LogInOutcome::Done { user, ended } => (user, ended),
            LogInOutcome::Used => return Err(Error::Plain(Code::WrongCode)),
            LogInOutcome::Disabled => return Err(Error::Plain(Code::AccountDisabled)),
        };
        auth.budgets.used(&newcomer.phone, challenge.address);
        // If the end of the oldest sessions cannot be published to the other nodes, it is published later; the login is in the ledger.
        let _ = auth.end_everywhere(&ended, user.id).await;
        auth.share_new(&[Session { id, user: user.id, created_at: now, expires_at }], now).await;
        Ok(LoggedIn { token: auth.token_signer.token(id, user.id), user, expires_at })
    }
}
