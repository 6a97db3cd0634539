//! Login codes: challenges, attempts, and the login that consumes a challenge.
//!
//! Every transaction here locks the phone's row first, so those of one phone are serialized.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use stampede_core::ports::{Account, Challenge, ChallengeId, ChallengeSelector, LogInOutcome, Result, SessionId};
use stampede_core::{LONG_CODES_AFTER, Phone, Timestamp, User};

use super::accounts::{USERS, delete_sessions, read_account, session_ids};
use super::{Store, unreadable};
use crate::db::{Dialect, Row, Tx, args};

/// How long the failures of a phone are kept after the last attempt. Failures that made its codes longer are kept until a login.
const FAILURES_RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);
/// How long a phone without failures is kept: longer than any code is valid.
const PHONE_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// The resolution of stored times.
const TICK: Duration = Duration::from_millis(1);

const CHALLENGES: &str =
    "SELECT id, phone, address, code_mac, digits, created_at, expires_at, tries FROM login_challenge WHERE";

fn read_challenge(row: &Row) -> Result<Challenge> {
    let wrong = || unreadable("a login challenge");
    Ok(Challenge {
        id: ChallengeId(row.bytes(0)?.try_into().map_err(|_| wrong())?),
        phone: Phone::parse(&row.text(1)?).map_err(|_| wrong())?,
        address: row.text(2)?.parse().map_err(|_| wrong())?,
        code_mac: row.bytes(3)?,
        digits: u32::try_from(row.int(4)?).map_err(|_| wrong())?,
        created_at: Timestamp::from_ms(row.int(5)?),
        expires_at: Timestamp::from_ms(row.int(6)?),
    })
}

/// Locks the phone's row, and creates it if it is missing.
async fn lock_phone(tx: &mut Tx, dialect: Dialect, phone: &Phone, now: Timestamp) -> Result<()> {
    let insert = "INSERT INTO login_phone (phone, failures, used_at) VALUES (?, 0, ?)";
    let sql = format!("{insert}{}", dialect.on_conflict_update("phone", &["used_at"]));
    tx.execute(&sql, args![phone.as_str(), now.ms()]).await?;
    Ok(())
}

/// The live challenges of a phone, given oldest first, that must end so that there are at most `max_live` with a new one from `address`: the
/// oldest of the address with the most challenges.
fn excess_challenges(live: &[(ChallengeId, IpAddr)], address: IpAddr, max_live: usize) -> Vec<ChallengeId> {
    let mut counts = HashMap::from([(address, 1_usize)]);
    for (_, address) in live {
        *counts.entry(*address).or_default() += 1;
    }
    let (mut live, mut ended) = (live.to_vec(), Vec::new());
    while live.len() >= max_live.max(1) {
        let most = live.iter().map(|(_, address)| counts[address]).max().unwrap_or(0);
        let Some(place) = live.iter().position(|(_, address)| counts[address] == most) else { break };
        let (id, address) = live.remove(place);
        counts.entry(address).and_modify(|count| *count -= 1);
        ended.push(id);
    }
    ended
}

/// Deletes phones that were not used for a long time.
pub(super) async fn delete_phones(tx: &mut Tx, now: Timestamp) -> Result<u64> {
    let mut gone = 0;
    for (failures_below, kept) in [(1, PHONE_RETENTION), (LONG_CODES_AFTER, FAILURES_RETENTION)] {
        let sql = "DELETE FROM login_phone WHERE used_at <= ? AND failures < ?";
        gone += tx.execute(sql, args![now.minus(kept).ms(), failures_below]).await?;
    }
    Ok(gone)
}

impl Store {
    pub(super) async fn read_failures(&self, phone: &Phone) -> Result<u32> {
        let row = self.db.row("SELECT failures FROM login_phone WHERE phone = ?", args![phone.as_str()]).await?;
        let failures = row.map_or(Ok(0), |row| row.int(0))?;
        Ok(u32::try_from(failures).unwrap_or(u32::MAX))
    }

    pub(super) async fn insert_challenge(&self, challenge: &Challenge, max_live: usize) -> Result<()> {
        let Challenge { id, phone, address, code_mac, digits, created_at, expires_at } = challenge;
        let mut tx = self.db.begin().await?;
        lock_phone(&mut tx, self.db.dialect(), phone, *created_at).await?;
        let sql = format!("{CHALLENGES} phone = ? AND expires_at > ? ORDER BY created_at, id");
        let rows = tx.rows(&sql, args![phone.as_str(), created_at.ms()]).await?;
        let live = rows.iter().map(read_challenge).collect::<Result<Vec<_>>>()?;
        // The newest one is found by its time, so two of the same millisecond need different ones.
        let created_at = live.last().map_or(*created_at, |newest| newest.created_at.plus(TICK).max(*created_at));
        let live: Vec<_> = live.into_iter().map(|one| (one.id, one.address)).collect();
        for id in excess_challenges(&live, *address, max_live) {
            tx.execute("DELETE FROM login_challenge WHERE id = ?", args![&id.0[..]]).await?;
        }
        let insert = "INSERT INTO login_challenge (id, phone, address, code_mac, digits, tries, created_at, expires_at) \
                      VALUES (?, ?, ?, ?, ?, 0, ?, ?)";
        let address = address.to_string();
        let args = args![&id.0[..], phone.as_str(), &*address, &**code_mac, *digits, created_at.ms(), expires_at.ms()];
        tx.execute(insert, args).await?;
        tx.commit().await
    }

    /// Counts the attempt in a separate transaction, committed before the challenge is returned.
    pub(super) async fn count_attempt(
        &self,
        phone: &Phone,
        which: ChallengeSelector,
        max_tries: u32,
        now: Timestamp,
    ) -> Result<Option<Challenge>> {
        // Read without a lock first, so that an attempt without a challenge costs no write.
        let row = match which {
            ChallengeSelector::Id(id) => {
                let sql = format!("{CHALLENGES} id = ? AND phone = ?");
                self.db.row(&sql, args![&id.0[..], phone.as_str()]).await?
            }
            ChallengeSelector::NewestFrom(address) => {
                let sql = format!("{CHALLENGES} phone = ? AND address = ? ORDER BY created_at DESC, id DESC LIMIT 1");
                self.db.row(&sql, args![phone.as_str(), &*address.to_string()]).await?
            }
        };
        let Some(row) = row else { return Ok(None) };
        let challenge = read_challenge(&row)?;
        if challenge.expires_at <= now || row.int(7)? >= i64::from(max_tries) {
            return Ok(None);
        }
        let mut tx = self.db.begin().await?;
        lock_phone(&mut tx, self.db.dialect(), phone, now).await?;
        let sql = "UPDATE login_challenge SET tries = tries + 1 WHERE id = ? AND tries < ?";
        let counted = tx.execute(sql, args![&challenge.id.0[..], max_tries]).await?;
        if counted == 0 {
            tx.roll_back().await?;
            return Ok(None);
        }
        tx.execute("UPDATE login_phone SET failures = failures + 1 WHERE phone = ?", args![phone.as_str()]).await?;
        tx.commit().await?;
        Ok(Some(challenge))
    }

    pub(super) async fn use_challenge(
        &self,
        challenge: ChallengeId,
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        max_sessions: usize,
        now: Timestamp,
    ) -> Result<LogInOutcome> {
        let (dialect, phone) = (self.db.dialect(), newcomer.phone.as_str());
        let mut tx = self.db.begin().await?;
        lock_phone(&mut tx, dialect, &newcomer.phone, now).await?;
        let sql = "DELETE FROM login_challenge WHERE id = ? AND phone = ?";
        if tx.execute(sql, args![&challenge.0[..], phone]).await? == 0 {
            tx.roll_back().await?;
            return Ok(LogInOutcome::Used);
        }
        tx.execute("UPDATE login_phone SET failures = 0 WHERE phone = ?", args![phone]).await?;
        let insert = "INSERT INTO person (id, phone, nickname, created_at) VALUES (?, ?, ?, ?)";
        let insert = format!("{insert}{}", dialect.on_conflict_do_nothing("phone"));
        tx.execute(&insert, args![newcomer.id.get(), phone, newcomer.nickname.as_str(), now.ms()]).await?;
        let row = tx.row(&format!("{USERS} phone = ?{}", dialect.for_update()), args![phone]).await?;
        let Account { user, disabled, .. } = read_account(&row.ok_or_else(|| unreadable("a person"))?)?;
        if disabled {
            tx.commit().await?;
            return Ok(LogInOutcome::Disabled);
        }
        let mut ended = session_ids(&mut tx, user.id, now).await?;
        // The newest sessions stay, with room for the new one.
        ended.truncate((ended.len() + 1).saturating_sub(max_sessions));
        delete_sessions(&mut tx, &ended).await?;
        let insert = "INSERT INTO session (id, user_id, created_at, expires_at) VALUES (?, ?, ?, ?)";
        tx.execute(insert, args![&session.0[..], user.id.get(), now.ms(), expires_at.ms()]).await?;
        tx.commit().await?;
        Ok(LogInOutcome::Done { user, ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_cannot_evict_the_challenge_of_another() {
        let challenge = |n: u8| ChallengeId([n; 16]);
        let from = |n: u8| IpAddr::from([192, 0, 2, n]);
        let mut live = vec![(challenge(0), from(1))];
        live.extend((1..5).map(|n| (challenge(n), from(2))));
        assert_eq!(excess_challenges(&live, from(2), 6), [], "there is room");
        assert_eq!(excess_challenges(&live, from(2), 5), [challenge(1)], "the oldest of those that ask the most");
        assert_eq!(excess_challenges(&live, from(1), 5), [challenge(1)]);
        assert_eq!(excess_challenges(&live, from(3), 4), [challenge(1), challenge(2)]);
        let each_its_own: Vec<_> = (0..5).map(|n| (challenge(n), from(n))).collect();
        assert_eq!(excess_challenges(&each_its_own, from(9), 5), [challenge(0)], "the oldest of all");
    }
}
