//! People, their login codes and their sessions.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use stampede_core::ports::{Accounts, CodeTry, LedgerError, Result, Session, SessionId};
use stampede_core::{Phone, Timestamp, User, UserId};

use super::{Store, again, unreadable};
use crate::db::{Row, args};

const PEOPLE: &str = "SELECT id, phone, nickname FROM person WHERE";

/// How many rows go into one statement.
const ROWS: usize = 500;

/// How long a phone's tries are remembered after the last.
const TRIES_KEPT: Duration = Duration::from_secs(24 * 3600);

/// So many tries a phone has, whatever the number of its codes; then one every quarter of an hour.
const PHONE_TRIES: i64 = 20;

/// How long after its latest try a phone with so many must wait: five for free, then 1, 2, 4, … up to 64 seconds, and a quarter
/// of an hour after the twentieth. Never for ever: somebody who guesses at another's phone can delay its owner, not lock him out.
fn pause_after(all_tries: i64) -> Duration {
    match u32::try_from(all_tries - 5) {
        Ok(_) if all_tries >= PHONE_TRIES => Duration::from_secs(15 * 60),
        Ok(beyond) => Duration::from_secs(1 << beyond.min(6)),
        Err(_) => Duration::ZERO,
    }
}

fn read_user(row: &Row) -> Result<User> {
    let id = UserId::new(row.int(0)?).map_err(|_| unreadable("a person"))?;
    let phone = Phone::parse(&row.text(1)?).map_err(|_| unreadable("a person"))?;
    Ok(User { id, phone, nickname: row.text(2)? })
}

const SESSIONS: &str = "SELECT id, user_id, created_at, expires_at FROM session WHERE";

fn read_session(row: &Row) -> Result<Session> {
    Ok(Session {
        id: SessionId(row.bytes(0)?.try_into().map_err(|_| unreadable("a session"))?),
        user: UserId::new(row.int(1)?).map_err(|_| unreadable("a session"))?,
        created_at: Timestamp::from_ms(row.int(2)?),
        expires_at: Timestamp::from_ms(row.int(3)?),
    })
}

impl Store {
    /// Counts the try in a transaction of its own, committed before the seal is told.
    async fn count_try(&self, phone: &Phone, max_tries: u32, now: Timestamp) -> Result<CodeTry> {
        let lock = self.db.dialect().for_update();
        let mut tx = self.db.begin().await?;
        let sql = format!("SELECT seal, tries, expires_at, all_tries, tried_at FROM login_code WHERE phone = ?{lock}");
        let row = tx.row(&sql, args![phone.as_str()]).await?;
        let refused = match &row {
            None => CodeTry::NoCode,
            Some(row) if row.int(1)? >= i64::from(max_tries) || row.int(2)? <= now.ms() => CodeTry::NoCode,
            Some(row) => {
                let (all_tries, tried_at) = (row.int(3)?, Timestamp::from_ms(row.int(4)?));
                let all_tries = if tried_at.plus(TRIES_KEPT) <= now { 0 } else { all_tries };
                match tried_at.plus(pause_after(all_tries)).ms() - now.ms() {
                    wait_ms @ 1.. => CodeTry::Wait(Duration::from_millis(wait_ms.unsigned_abs())),
                    _ => {
                        let sql =
                            "UPDATE login_code SET tries = tries + 1, all_tries = ?, tried_at = ? WHERE phone = ?";
                        tx.execute(sql, args![all_tries + 1, now.ms(), phone.as_str()]).await?;
                        tx.commit().await?;
                        return Ok(CodeTry::Seal(row.bytes(0)?));
                    }
                }
            }
        };
        tx.roll_back().await?;
        Ok(refused)
    }

    async fn use_code(
        &self,
        seal: &[u8],
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Option<User>> {
        let phone = newcomer.phone.as_str();
        let mut tx = self.db.begin().await?;
        let used = tx.execute("DELETE FROM login_code WHERE phone = ? AND seal = ?", args![phone, seal]).await?;
        if used == 0 {
            tx.roll_back().await?;
            return Ok(None);
        }
        let insert = "INSERT INTO person (id, phone, nickname, created_at) VALUES (?, ?, ?, ?)";
        let insert = format!("{insert}{}", self.db.dialect().or_leave("phone"));
        tx.execute(&insert, args![newcomer.id.get(), phone, newcomer.nickname.as_str(), now.ms()]).await?;
        let row = tx.row(&format!("{PEOPLE} phone = ?"), args![phone]).await?;
        let user = read_user(&row.ok_or_else(|| unreadable("a person"))?)?;
        let insert = "INSERT INTO session (id, user_id, created_at, expires_at) VALUES (?, ?, ?, ?)";
        tx.execute(insert, args![&session.0[..], user.id.get(), now.ms(), expires_at.ms()]).await?;
        tx.commit().await?;
        Ok(Some(user))
    }

    async fn open_all(
        &self,
        people: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>> {
        let dialect = self.db.dialect();
        let (now, expires_at) = (now.ms(), expires_at.ms());
        // Numbers, phones and nicknames of ours: nothing that could be more than a value.
        let quoted = |user: &User| format!("'{}'", user.phone.as_str());
        let person = |user: &User| format!("({},{},'{}',{now})", user.id, quoted(user), user.nickname);
        let mut tx = self.db.begin().await?;
        let mut ids = HashMap::with_capacity(people.len());
        for some in people.chunks(ROWS) {
            let rows = some.iter().map(person).collect::<Vec<_>>().join(",");
            let leave = dialect.or_leave("phone");
            tx.execute_text(format!("INSERT INTO person (id, phone, nickname, created_at) VALUES {rows}{leave}"))
                .await?;
            let phones = some.iter().map(quoted).collect::<Vec<_>>().join(",");
            for row in tx.rows_text(format!("{PEOPLE} phone IN ({phones})")).await? {
                let user = read_user(&row)?;
                ids.insert(user.phone, user.id);
            }
        }
        let found = people.iter().map(|user| ids.get(&user.phone).copied()).collect::<Option<Vec<_>>>();
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

    async fn move_expiries(&self, sessions: &[Session]) -> Result<()> {
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

    async fn delete_expired(&self, now: Timestamp) -> Result<u64> {
        let mut tx = self.db.begin().await?;
        let mut gone = 0;
        // The tries of a phone are remembered longer than its code.
        for (table, until) in [("session", now), ("login_code", now.minus(TRIES_KEPT))] {
            gone += tx.execute(&format!("DELETE FROM {table} WHERE expires_at <= ?"), args![until.ms()]).await?;
        }
        tx.commit().await?;
        Ok(gone)
    }
}

#[async_trait]
impl Accounts for Store {
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>> {
        let insert = format!("INSERT INTO secret (name, value) VALUES (?, ?){}", self.db.dialect().or_leave("name"));
        again!(self.db.execute(&insert, args![name, fresh]))?;
        let row = self.db.row("SELECT value FROM secret WHERE name = ?", args![name]).await?;
        row.ok_or_else(|| unreadable("a secret"))?.bytes(0)
    }

    async fn put_code(&self, phone: &Phone, seal: &[u8], expires_at: Timestamp) -> Result<()> {
        let insert =
            "INSERT INTO login_code (phone, seal, tries, expires_at, all_tries, tried_at) VALUES (?, ?, 0, ?, 0, 0)";
        let replace = self.db.dialect().or_replace("phone", &["seal", "tries", "expires_at"]);
        let sql = format!("{insert}{replace}");
        again!(self.db.execute(&sql, args![phone.as_str(), seal, expires_at.ms()]))
    }

    async fn try_code(&self, phone: &Phone, max_tries: u32, now: Timestamp) -> Result<CodeTry> {
        again!(self.count_try(phone, max_tries, now))
    }

    async fn log_in(
        &self,
        seal: &[u8],
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Option<User>> {
        again!(self.use_code(seal, newcomer, session, expires_at, now))
    }

    async fn open_sessions(
        &self,
        people: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>> {
        again!(self.open_all(people, sessions, expires_at, now))
    }

    async fn user(&self, id: UserId) -> Result<Option<User>> {
        let row = self.db.row(&format!("{PEOPLE} id = ?"), args![id.get()]).await?;
        row.as_ref().map(read_user).transpose()
    }

    async fn session(&self, id: SessionId, now: Timestamp) -> Result<Option<Session>> {
        let row = self.db.row(&format!("{SESSIONS} id = ? AND expires_at > ?"), args![&id.0[..], now.ms()]).await?;
        row.as_ref().map(read_session).transpose()
    }

    async fn touch_sessions(&self, sessions: &[Session]) -> Result<()> {
        again!(self.move_expiries(sessions))
    }

    async fn sessions_of(&self, user: UserId, now: Timestamp) -> Result<Vec<Session>> {
        let sql = format!("{SESSIONS} user_id = ? AND expires_at > ? ORDER BY created_at DESC LIMIT 100");
        self.db.rows(&sql, args![user.get(), now.ms()]).await?.iter().map(read_session).collect()
    }

    async fn end_session(&self, user: UserId, id: SessionId) -> Result<bool> {
        again!(self.delete_session(user, id))
    }

    async fn forget_expired(&self, now: Timestamp) -> Result<u64> {
        again!(self.delete_expired(now))
    }
}
