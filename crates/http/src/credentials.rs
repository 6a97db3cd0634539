//! Administrators: named tokens with roles. Tokens are never printed, are compared in constant time, and can be replaced while the server
//! runs.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use stampede_limit::{Limit, SlidingWindow, rate_limit_key};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use crate::predictable::is_predictable;

/// What an administrator may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// May read everything and change nothing.
    Viewer,
    /// May read and change everything.
    Operator,
}

#[derive(Clone)]
pub struct AdminToken {
    name: Arc<str>,
    role: Role,
    token: String,
}

/// The minimum length of a token: 128 random bits in hexadecimal digits.
const MIN_CHARS: usize = 32;

/// Why a token is not accepted. Never contains the token.
#[derive(Debug, thiserror::Error)]
pub enum InvalidAdminToken {
    #[error("must have at least {MIN_CHARS} visible ASCII characters and no spaces")]
    Short,
    #[error(
        "is too easy to guess: its characters repeat, or follow the alphabet or the keyboard; `openssl rand -hex 32` makes a good one"
    )]
    Weak,
}

impl AdminToken {
    /// Refuses a token that could be guessed.
    pub fn new(name: impl Into<Arc<str>>, role: Role, token: impl Into<String>) -> Result<Self, InvalidAdminToken> {
        let (name, token) = (name.into(), token.into());
        if token.len() < MIN_CHARS || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(InvalidAdminToken::Short);
        }
        if is_predictable(&token) {
            return Err(InvalidAdminToken::Weak);
        }
        Ok(Self { name, role, token })
    }

    /// The names of two administrators with the same token, whose actions the audit log could not tell apart.
    pub fn find_equal(tokens: &[Self]) -> Option<(&str, &str)> {
        let mut pairs =
            tokens.iter().enumerate().flat_map(|(n, one)| tokens[..n].iter().map(move |other| (other, one)));
        pairs.find(|(other, one)| other.token == one.token).map(|(other, one)| (&*other.name, &*one.name))
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.name, self.role)
    }
}

/// The owner of a token. All tokens are compared, so that the time does not depend on which one matches.
fn find(tokens: &[AdminToken], token: &str) -> Option<(Arc<str>, Role)> {
    let (mut found, mut index) = (Choice::from(0), 0u64);
    for (n, known) in (0u64..).zip(tokens) {
        let same = known.token.as_bytes().ct_eq(token.as_bytes());
        index = u64::conditional_select(&index, &n, same);
        found |= same;
    }
    let index = usize::try_from(index).ok()?;
    bool::from(found).then(|| (tokens[index].name.clone(), tokens[index].role))
}

/// Why authentication failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AuthError {
    WrongToken,
    /// Too many wrong tokens came from this address.
    Limited {
        wait: Duration,
    },
}

/// How many pairs of an administrator and an address are remembered.
const MAX_ACCEPTED: usize = 10_000;

/// The administrators, and how many wrong tokens each address has sent.
#[derive(Debug)]
pub(crate) struct Administrators {
    tokens: RwLock<Arc<[AdminToken]>>,
    wrong_tokens: SlidingWindow<IpAddr>,
    /// Which administrators were accepted from which addresses.
    accepted: Mutex<HashSet<(IpAddr, Arc<str>)>>,
}

impl Administrators {
    pub(crate) fn new(tokens: Vec<AdminToken>, wrong_tokens_per_address: Limit, memory: usize) -> Self {
        let wrong_tokens = SlidingWindow::new(wrong_tokens_per_address, memory);
        Self { tokens: RwLock::new(tokens.into()), wrong_tokens, accepted: Mutex::default() }
    }

    /// How many wrong tokens were not counted, because the memory of the limit was full.
    pub(crate) fn let_through(&self) -> u64 {
        self.wrong_tokens.let_through()
    }

    /// Replaces all tokens.
    pub(crate) fn replace(&self, tokens: Vec<AdminToken>) {
        *self.tokens.write() = tokens.into();
    }

    /// The name and role of the token's owner.
    ///
    /// An address that has sent too many wrong tokens is refused even with a right one, so that it cannot go on guessing. Administrators
    /// who were accepted from the same address before are exempt: others behind the same proxy cannot lock them out.
    pub(crate) fn authenticate(&self, address: IpAddr, token: &str) -> Result<(Arc<str>, Role), AuthError> {
        let address = rate_limit_key(address);
        let limited = self.wrong_tokens.peek(address);
        let tokens = self.tokens.read().clone();
        let Some((name, role)) = find(&tokens, token) else {
            let counted = limited.and_then(|()| self.wrong_tokens.check(address));
            return Err(counted.map_or_else(|wait| AuthError::Limited { wait }, |()| AuthError::WrongToken));
        };
        let mut accepted = self.accepted.lock();
        let key = (address, name);
        let is_known = accepted.contains(&key);
        match limited {
            Err(wait) if !is_known => return Err(AuthError::Limited { wait }),
            Ok(()) if !is_known && accepted.len() < MAX_ACCEPTED => {
                accepted.insert(key.clone());
            }
            _ => {}
        }
        Ok((key.1, role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: &str = "token-of-alice-7f3a9c51e02b8d46";
    const BOB: &str = "token-of-bob-c2b8e64d90a1573f1e";

    fn token(name: &str, role: Role, token: &str) -> AdminToken {
        AdminToken { name: name.into(), role, token: token.into() }
    }

    fn two_tokens() -> Vec<AdminToken> {
        vec![token("alice", Role::Operator, ALICE), token("bob", Role::Viewer, BOB)]
    }

    #[test]
    fn token_identifies_its_administrator() {
        let tokens = two_tokens();
        let owner = |token| find(&tokens, token).map(|(name, role)| (name.to_string(), role));
        assert_eq!(owner(ALICE), Some(("alice".into(), Role::Operator)));
        assert_eq!(owner(BOB), Some(("bob".into(), Role::Viewer)));
        for wrong in ["", "token-of", &format!("{BOB}x"), &BOB.to_uppercase()] {
            assert_eq!(owner(wrong), None);
        }
        assert!(!format!("{tokens:?}").contains("token-of"));
    }

    #[test]
    fn weak_and_equal_tokens_are_refused() {
        let new = |text: &str| AdminToken::new("a", Role::Viewer, text);
        for short in ["", "0123456789abcdef", &"é".repeat(32), "with a space 7f3a9c51e02b8d46c2b8e64d"] {
            assert!(matches!(new(short), Err(InvalidAdminToken::Short)), "{short}");
        }
        for weak in [&"ab".repeat(40), "changemechangemechangeme-changeme", "qwertyuiopasdfghjklzxcvbnm1234567890"] {
            assert!(matches!(new(weak), Err(InvalidAdminToken::Weak)), "{weak}");
        }
        assert!(new("5d0c81f7e92a46b3a1de7788f04c9b25").is_ok());
        assert_eq!(AdminToken::find_equal(&two_tokens()), None);
        let third = token("carol", Role::Viewer, ALICE);
        assert_eq!(AdminToken::find_equal(&[two_tokens(), vec![third]].concat()), Some(("alice", "carol")));
    }

    #[test]
    fn only_the_address_that_guesses_is_limited() {
        let limit = Limit { count: 3, window: Duration::from_secs(3600) };
        let all = Administrators::new(two_tokens(), limit, 100);
        let [office, attacker, home]: [IpAddr; 3] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|ip| ip.parse().unwrap());
        let name = |address, token| all.authenticate(address, token).map(|(name, _)| name.to_string());
        assert_eq!(name(office, ALICE), Ok("alice".into()));
        for address in [office, attacker] {
            for _ in 0..3 {
                assert_eq!(name(address, "wrong"), Err(AuthError::WrongToken));
            }
            assert!(matches!(name(address, "wrong"), Err(AuthError::Limited { .. })));
        }
        assert!(
            matches!(name(attacker, ALICE), Err(AuthError::Limited { .. })),
            "the right token after too many wrong ones"
        );
        assert_eq!(name(home, ALICE), Ok("alice".into()), "another address");
        assert_eq!(name(office, ALICE), Ok("alice".into()), "accepted from there before");
        assert!(matches!(name(office, BOB), Err(AuthError::Limited { .. })), "not accepted from there before");
        all.replace(vec![token("alice", Role::Operator, BOB)]);
        assert_eq!(name(office, BOB), Ok("alice".into()), "the new token");
        assert!(matches!(name(home, ALICE), Err(AuthError::WrongToken)), "the old token");
    }
}
