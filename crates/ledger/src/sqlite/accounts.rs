//! People, their login codes and their sessions.

use async_trait::async_trait;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;
use stampede_core::ports::{Accounts, LedgerError, Result, Session, SessionId};
use stampede_core::{Phone, Timestamp, User, UserId};

use super::{Sqlite, commit};
use crate::failed;

const USERS: &str = "SELECT id, phone, nickname FROM user WHERE ";

fn read_user(row: &SqliteRow) -> Result<User> {
    let user = || {
        let (id, phone) = (UserId::new(row.get(0)).ok()?, Phone::parse(row.get(1)).ok()?);
        Some(User { id, phone, nickname: row.get(2) })
    };
    user().ok_or_else(|| LedgerError::Poison("a user cannot be read".into()))
}

#[async_trait]
impl Accounts for Sqlite {
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>> {
        sqlx::query("INSERT INTO secret (name, value) VALUES (?1, ?2) ON CONFLICT DO NOTHING")
            .bind(name)
            .bind(fresh)
            .execute(&self.writer)
            .await
            .map_err(failed)?;
        sqlx::query_scalar("SELECT value FROM secret WHERE name = ?1")
            .bind(name)
            .fetch_one(&self.writer)
            .await
            .map_err(failed)
    }

    async fn put_code(&self, phone: &Phone, seal: &[u8], expires_at: Timestamp) -> Result<()> {
        sqlx::query("REPLACE INTO login_code (phone, seal, expires_at) VALUES (?1, ?2, ?3)")
            .bind(phone.as_str())
            .bind(seal)
            .bind(expires_at.ms())
            .execute(&self.writer)
            .await
            .map_err(failed)?;
        Ok(())
    }

    async fn try_code(&self, phone: &Phone, max_tries: u32, now: Timestamp) -> Result<Option<Vec<u8>>> {
        sqlx::query_scalar(
            "UPDATE login_code SET tries = tries + 1 WHERE phone = ?1 AND tries < ?2 AND expires_at > ?3
             RETURNING seal",
        )
        .bind(phone.as_str())
        .bind(max_tries)
        .bind(now.ms())
        .fetch_optional(&self.writer)
        .await
        .map_err(failed)
    }

    async fn log_in(
        &self,
        seal: &[u8],
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Option<User>> {
        let mut tx = self.begin().await?;
        let used = sqlx::query("DELETE FROM login_code WHERE phone = ?1 AND seal = ?2")
            .bind(newcomer.phone.as_str())
            .bind(seal)
            .execute(&mut *tx)
            .await
            .map_err(failed)?;
        if used.rows_affected() == 0 {
            return Ok(None);
        }
        sqlx::query(
            "INSERT INTO user (id, phone, nickname, created_at) VALUES (?1, ?2, ?3, ?4)
             ON CONFLICT (phone) DO NOTHING",
        )
        .bind(newcomer.id.get())
        .bind(newcomer.phone.as_str())
        .bind(&newcomer.nickname)
        .bind(now.ms())
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
        let row = sqlx::query(sqlx::AssertSqlSafe(format!("{USERS} phone = ?1")))
            .bind(newcomer.phone.as_str())
            .fetch_one(&mut *tx)
            .await
            .map_err(failed)?;
        let user = read_user(&row)?;
        sqlx::query("INSERT INTO session (id, user_id, expires_at) VALUES (?1, ?2, ?3)")
            .bind(&session.0[..])
            .bind(user.id.get())
            .bind(expires_at.ms())
            .execute(&mut *tx)
            .await
            .map_err(failed)?;
        commit(tx).await?;
        Ok(Some(user))
    }

    async fn user(&self, id: UserId) -> Result<Option<User>> {
        let row = sqlx::query(sqlx::AssertSqlSafe(format!("{USERS} id = ?1")))
            .bind(id.get())
            .fetch_optional(&self.readers)
            .await
            .map_err(failed)?;
        row.as_ref().map(read_user).transpose()
    }

    async fn session(&self, id: SessionId, now: Timestamp) -> Result<Option<Session>> {
        let row = sqlx::query("SELECT user_id, expires_at FROM session WHERE id = ?1 AND expires_at > ?2")
            .bind(&id.0[..])
            .bind(now.ms())
            .fetch_optional(&self.readers)
            .await
            .map_err(failed)?;
        let Some(row) = row else { return Ok(None) };
        let user = UserId::new(row.get(0)).map_err(|error| LedgerError::Poison(error.into()))?;
        Ok(Some(Session { id, user, expires_at: Timestamp::from_ms(row.get(1)) }))
    }

    async fn touch_sessions(&self, sessions: &[Session]) -> Result<()> {
        let mut tx = self.begin().await?;
        for session in sessions {
            sqlx::query("UPDATE session SET expires_at = MAX(expires_at, ?2) WHERE id = ?1")
                .bind(&session.id.0[..])
                .bind(session.expires_at.ms())
                .execute(&mut *tx)
                .await
                .map_err(failed)?;
        }
        commit(tx).await
    }

    async fn end_session(&self, id: SessionId) -> Result<()> {
        sqlx::query("DELETE FROM session WHERE id = ?1").bind(&id.0[..]).execute(&self.writer).await.map_err(failed)?;
        Ok(())
    }

    async fn forget_expired(&self, now: Timestamp) -> Result<u64> {
        let mut gone = 0;
        for sql in ["DELETE FROM session WHERE expires_at <= ?1", "DELETE FROM login_code WHERE expires_at <= ?1"] {
            let done = sqlx::query(sql).bind(now.ms()).execute(&self.writer).await.map_err(failed)?;
            gone += done.rows_affected();
        }
        Ok(gone)
    }
}
