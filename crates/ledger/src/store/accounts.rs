//! Users and their sessions. Login codes are in `login`.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::{
    Account, Accounts, Challenge, ChallengeId, ChallengeSelector, Disabled, Fence, Fenced, LedgerError, LogInOutcome,
    Result, Session, SessionId,
};
use stampede_core::{Phone, Timestamp, User, UserId};

use super::{Store, retry_conflicts, unreadable};
use crate::db::{Arg, Row, Tx, args};

pub(super) const USERS: &str = "SELECT id, phone, nickname, created_at, disabled FROM person WHERE";

/// The maximum number of rows per statement.
const ROWS: usize = 500;

pub(super) fn read_user(row: &Row) -> Result<User> {
    let id = UserId::new(row.int(0)?).map_err(|_| unreadable("a person"))?;
    let phone = Phone::parse(&row.text(1)?).map_err(|_| unreadable("a person"))?;
    Ok(User { id, phone, nickname: row.text(2)? })
}

pub(super) fn read_account(row: &Row) -> Result<Account> {
    let (user, created_at) = (read_user(row)?, Timestamp::from_ms(row.int(3)?));
    Ok(Account { user, created_at, disabled: row.int(4)? != 0 })
}

fn read_session_id(row: &Row) -> Result<SessionId> {
    Ok(SessionId(row.bytes(0)?.try_into().map_err(|_| unreadable("a session"))?))
}

/// The user's sessions that end after this time, oldest first.
pub(super) async fn session_ids(tx: &mut Tx, user: UserId, end_after: Timestamp) -> Result<Vec<SessionId>> {
    let sql = "SELECT id FROM session WHERE user_id = ? AND expires_at > ? ORDER BY created_at, id";
    tx.rows(sql, args![user.get(), end_after.ms()]).await?.iter().map(read_session_id).collect()
}

pub(super) async fn delete_sessions(tx: &mut Tx, sessions: &[SessionId]) -> Result<()> {
    for session in sessions {
        tx.execute("DELETE FROM session WHERE id = ?", args![&session.0[..]]).await?;
    }
    Ok(())
}

const SESSIONS: &str = "SELECT id, user_id, created_at, expires_at FROM session WHERE";

fn read_session(row: &Row) -> Result<Session> {
    Ok(Session {
        id: read_session_id(row)?,
        user: UserId::new(row.int(1)?).map_err(|_| unreadable("a session"))?,
        created_at: Timestamp::from_ms(row.int(2)?),
        expires_at: Timestamp::from_ms(row.int(3)?),
    })
}

impl Store {
    async fn open_all(
        &self,
        users: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>> {
        let dialect = self.db.dialect();
        let (now, expires_at) = (now.ms(), expires_at.ms());
        // Only ids, validated phones and generated nicknames, so the text cannot contain SQL.
        let quoted = |user: &User| format!("'{}'", user.phone.as_str());
        let person = |user: &User| format!("({},{},'{}',{now})", user.id, quoted(user), user.nickname);
        let mut tx = self.db.begin().await?;
        let mut ids = HashMap::with_capacity(users.len());
        for some in users.chunks(ROWS) {
            let rows = some.iter().map(person).collect::<Vec<_>>().join(",");
            let leave = dialect.on_conflict_do_nothing("phone");
            tx.execute_text(format!("INSERT INTO person (id, phone, nickname, created_at) VALUES {rows}{leave}"))
                .await?;
            let phones = some.iter().map(quoted).collect::<Vec<_>>().join(",");
            for row in tx.rows_text(format!("{USERS} phone IN ({phones})")).await? {
                let user = read_user(&row)?;
                ids.insert(user.phone, user.id);
            }
        }
        let found = users.iter().map(|user| ids.get(&user.phone).copied()).collect::<Option<Vec<_>>>();
        let found = found.ok_or_else(|| unreadable("a person"))?;
        let session =
            |(id, user): (&SessionId, &UserId)| format!("({},{user},{now},{expires_at})", dialect.bytes(&id.0));
        for (some, users) in sessions.chunks(ROWS).zip(found.chunks(ROWS)) {
            let rows = some.iter().zip(users).map(session).collect::<Vec<_>>().join(",");
            tx.execute_text(format!("INSERT INTO session (id, user_id, created_at, expires_at) VALUES {rows}")).await?;
        }
        tx.commit().await?;
        Ok(found)
    }

    async fn update_expiries(&self, sessions: &[Session]) -> Result<()> {
        let mut tx = self.db.begin().await?;
        for session in sessions {
            let (id, expires_at) = (&session.id.0[..], session.expires_at.ms());
            let update = "UPDATE session SET expires_at = ? WHERE id = ? AND expires_at < ?";
            tx.execute(update, args![expires_at, id, expires_at]).await?;
        }
        tx.commit().await
    }

    async fn delete_session(&self, user: UserId, id: SessionId) -> Result<bool> {
        let mut tx = self.db.begin().await?;
        let sql = "DELETE FROM session WHERE id = ? AND user_id = ?";
        let gone = tx.execute(sql, args![&id.0[..], user.get()]).await?;
        tx.commit().await?;
        Ok(gone > 0)
    }

    /// Ends all sessions of a user under the lock of the user's row, which a login takes as well.
    async fn delete_all_sessions(&self, user: UserId, disabled: Option<bool>) -> Result<Option<Disabled>> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        let found = tx.row(&format!("{USERS} id = ?{lock}"), args![user.get()]).await?;
        let Some(before) = found.as_ref().map(read_account).transpose()? else {
            tx.roll_back().await?;
            return Ok(None);
        };
        if let Some(disabled) = disabled {
            let sql = "UPDATE person SET disabled = ? WHERE id = ?";
            tx.execute(sql, args![u32::from(disabled), user.get()]).await?;
        }
        let ended = match disabled {
            Some(false) => Vec::new(),
            Some(true) | None => session_ids(&mut tx, user, Timestamp::from_ms(0)).await?,
        };
        delete_sessions(&mut tx, &ended).await?;
        tx.commit().await?;
        Ok(Some(Disabled { was: before.disabled, ended }))
    }

    async fn delete_expired_rows(&self, fence: Option<Fence>, now: Timestamp) -> Result<Fenced<u64>> {
        let mut tx = self.db.begin().await?;
        if !self.check_fence(&mut tx, fence).await? {
            tx.roll_back().await?;
            return Ok(Fenced::Superseded);
        }
        let mut gone = 0;
        for table in ["session", "login_challenge"] {
            gone += tx.execute(&format!("DELETE FROM {table} WHERE expires_at <= ?"), args![now.ms()]).await?;
        }
        gone += super::login::delete_phones(&mut tx, now).await?;
        tx.commit().await?;
        Ok(Fenced::Done(gone))
    }

    async fn read_account(&self, condition: &str, arg: Arg<'_>) -> Result<Option<Account>> {
        let row = self.db.row(&format!("{USERS} {condition} = ?"), &[arg]).await?;
        row.as_ref().map(read_account).transpose()
    }
}

#[async_trait]
impl Accounts for Store {
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>> {
        let insert = format!(
            "INSERT INTO secret (name, value) VALUES (?, ?){}",
            self.db.dialect().on_conflict_do_nothing("name")
        );
        retry_conflicts!(self.db.execute(&insert, args![name, fresh]))?;
        let row = self.db.row("SELECT value FROM secret WHERE name = ?", args![name]).await?;
        row.ok_or_else(|| unreadable("a secret"))?.bytes(0)
    }

    async fn login_failures(&self, phone: &Phone) -> Result<u32> {
        self.read_failures(phone).await
    }

    async fn put_challenge(&self, challenge: &Challenge, max_live: usize) -> Result<()> {
        retry_conflicts!(self.insert_challenge(challenge, max_live))
    }

    async fn try_challenge(
        &self,
        phone: &Phone,
        which: ChallengeSelector,
        max_tries: u32,
        now: Timestamp,
    ) -> Result<Option<Challenge>> {
        retry_conflicts!(self.count_attempt(phone, which, max_tries, now))
    }

    async fn log_in(
        &self,
        challenge: ChallengeId,
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        max_sessions: usize,
        now: Timestamp,
    ) -> Result<LogInOutcome> {
        retry_conflicts!(self.use_challenge(challenge, newcomer, session, expires_at, max_sessions, now))
    }

    async fn open_sessions(
        &self,
        users: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>> {
        retry_conflicts!(self.open_all(users, sessions, expires_at, now))
    }

    async fn user(&self, id: UserId) -> Result<Option<User>> {
        let row = self.db.row(&format!("{USERS} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_user).transpose()
    }

    async fn account(&self, id: UserId) -> Result<Option<Account>> {
        self.read_account("id", id.get().into()).await
    }

    async fn account_of(&self, phone: &Phone) -> Result<Option<Account>> {
        self.read_account("phone", phone.as_str().into()).await
    }

    async fn set_disabled(&self, user: UserId, disabled: bool) -> Result<Option<Disabled>> {
        retry_conflicts!(self.delete_all_sessions(user, Some(disabled)))
    }

    async fn session(&self, id: SessionId, now: Timestamp) -> Result<Option<Session>> {
        let row = self.db.row(&format!("{SESSIONS} id = ? AND expires_at > ?"), args![&id.0[..], now.ms()]).await?;
        row.as_ref().map(read_session).transpose()
    }

    async fn touch_sessions(&self, sessions: &[Session]) -> Result<()> {
        retry_conflicts!(self.update_expiries(sessions))
    }

    async fn sessions_of(&self, user: UserId, now: Timestamp) -> Result<Vec<Session>> {
        let sql = format!("{SESSIONS} user_id = ? AND expires_at > ? ORDER BY created_at DESC LIMIT 100");
        self.db.rows(&sql, args![user.get(), now.ms()]).await?.iter().map(read_session).collect()
    }

    async fn end_session(&self, user: UserId, id: SessionId) -> Result<bool> {
        retry_conflicts!(self.delete_session(user, id))
    }

    async fn end_sessions(&self, user: UserId) -> Result<Option<Vec<SessionId>>> {
        let ended = retry_conflicts!(self.delete_all_sessions(user, None))?;
        Ok(ended.map(|done| done.ended))
    }

    async fn delete_expired(&self, fence: Option<Fence>, now: Timestamp) -> Result<Fenced<u64>> {
        retry_conflicts!(self.delete_expired_rows(fence, now))
    }
}
