//! Who administers: named tokens with roles. Never shown, compared in constant time, replaced while the server runs.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use stampede_limit::{Limit, SlidingWindow};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use crate::address::counted_as;

/// What an administrator may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Look at everything, change nothing.
    Viewer,
    /// Everything.
    Operator,
}

#[derive(Clone)]
pub struct AdminToken {
    name: Arc<str>,
    role: Role,
    token: String,
}

/// The fewest characters of a token: 128 random bits in hexadecimal digits.
const MIN_CHARS: usize = 32;
/// The least that a token must look like, in bits. 128 random bits in hexadecimal digits look like more than 90 of them.
const MIN_BITS: f64 = 80.0;

/// Why a set of tokens is not accepted. Never has a token in it.
#[derive(Debug, thiserror::Error)]
pub enum BadToken {
    #[error("must have at least {MIN_CHARS} visible ASCII characters and no spaces")]
    Short,
    #[error("is too easy to guess: its characters repeat or count up; `openssl rand -hex 32` makes a good one")]
    Weak,
}

impl AdminToken {
    /// Refuses a token that could be guessed.
    pub fn new(name: impl Into<Arc<str>>, role: Role, token: impl Into<String>) -> Result<Self, BadToken> {
        let (name, token) = (name.into(), token.into());
        if token.len() < MIN_CHARS || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(BadToken::Short);
        }
        if apparent_bits(token.as_bytes()) < MIN_BITS || repeats(token.as_bytes()) {
            return Err(BadToken::Weak);
        }
        Ok(Self { name, role, token })
    }

    /// Two administrators with the same token: the audit log could not tell them apart.
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

/// How random a text looks: the entropy of its characters, or of the steps between them if that is less (`abcdef…` has many
/// characters and one step), over its length.
fn apparent_bits(text: &[u8]) -> f64 {
    let steps = text.windows(2).map(|pair| pair[1].wrapping_sub(pair[0]));
    let per_char = entropy(text.iter().copied()).min(entropy(steps));
    #[expect(clippy::cast_precision_loss, reason = "a token is short")]
    let length = text.len() as f64;
    per_char * length
}

/// Shannon entropy, in bits per value.
fn entropy(values: impl Iterator<Item = u8>) -> f64 {
    let (mut counts, mut all) = (BTreeMap::<u8, f64>::new(), 0.0);
    for value in values {
        *counts.entry(value).or_default() += 1.0;
        all += 1.0;
    }
    counts.values().map(|count| -count / all * (count / all).log2()).sum()
}

/// Is it a shorter text again and again?
fn repeats(text: &[u8]) -> bool {
    (1..=text.len() / 2).any(|period| text.iter().zip(&text[period..]).all(|(one, other)| one == other))
}

/// Whose token is it? Every one is compared, whether or not one was right before.
fn find(tokens: &[AdminToken], token: &str) -> Option<(Arc<str>, Role)> {
    let (mut found, mut place) = (Choice::from(0), 0u64);
    for (n, known) in (0u64..).zip(tokens) {
        let same = known.token.as_bytes().ct_eq(token.as_bytes());
        place = u64::conditional_select(&place, &n, same);
        found |= same;
    }
    let place = usize::try_from(place).ok()?;
    bool::from(found).then(|| (tokens[place].name.clone(), tokens[place].role))
}

/// Why a token was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    Wrong,
    /// Too many wrong ones came from this address.
    Limited {
        wait: Duration,
    },
}

/// How many administrators at addresses are remembered.
const MAX_ACCEPTED: usize = 10_000;

/// The administrators there are, and how often each address has guessed wrongly.
#[derive(Debug)]
pub(crate) struct Administrators {
    tokens: RwLock<Arc<[AdminToken]>>,
    guesses: SlidingWindow<IpAddr>,
    /// Who was accepted from where.
    accepted: Mutex<HashSet<(IpAddr, Arc<str>)>>,
}

impl Administrators {
    pub(crate) fn new(tokens: Vec<AdminToken>, guesses_per_ip: Limit, memory: usize) -> Self {
        let guesses = SlidingWindow::new(guesses_per_ip, memory);
        Self { tokens: RwLock::new(tokens.into()), guesses, accepted: Mutex::default() }
    }

    /// How many wrong tokens were not counted, because the memory was full.
    pub(crate) fn let_through(&self) -> u64 {
        self.guesses.let_through()
    }

    /// From now on these are the tokens.
    pub(crate) fn replace(&self, tokens: Vec<AdminToken>) {
        *self.tokens.write().unwrap_or_else(PoisonError::into_inner) = tokens.into();
    }

    /// The name and role of the token's owner.
    ///
    /// An address that has sent too many wrong tokens is refused whatever it sends, so that it cannot go on guessing. Exempt are
    /// administrators who were accepted from the same address before: others behind the same proxy cannot lock them out.
    pub(crate) fn authenticate(&self, address: IpAddr, token: &str) -> Result<(Arc<str>, Role), Refused> {
        let address = counted_as(address);
        let limited = self.guesses.peek(address);
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner).clone();
        let Some((name, role)) = find(&tokens, token) else {
            let counted = limited.and_then(|()| self.guesses.check(address));
            return Err(counted.map_or_else(|wait| Refused::Limited { wait }, |()| Refused::Wrong));
        };
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (address, name);
        let is_known = accepted.contains(&place);
        match limited {
            Err(wait) if !is_known => return Err(Refused::Limited { wait }),
            Ok(()) if !is_known && accepted.len() < MAX_ACCEPTED => {
                accepted.insert(place.clone());
            }
            _ => {}
        }
        Ok((place.1, role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    const ALICE: &str = "token-of-alice-7f3a9c51e02b8d46";
    const BOB: &str = "token-of-bob-c2b8e64d90a1573f1e";

    fn token(name: &str, role: Role, token: &str) -> AdminToken {
        AdminToken { name: name.into(), role, token: token.into() }
    }

    fn two() -> Vec<AdminToken> {
        vec![token("alice", Role::Operator, ALICE), token("bob", Role::Viewer, BOB)]
    }

    #[test]
    fn each_token_is_its_own() {
        let tokens = two();
        let who = |token| find(&tokens, token).map(|(name, role)| (name.to_string(), role));
        assert_eq!(who(ALICE), Some(("alice".into(), Role::Operator)));
        assert_eq!(who(BOB), Some(("bob".into(), Role::Viewer)));
        for wrong in ["", "token-of", &format!("{BOB}x"), &BOB.to_uppercase()] {
            assert_eq!(who(wrong), None);
        }
        assert!(!format!("{tokens:?}").contains("token-of"));
    }

    #[test]
    fn weak_and_equal_tokens_are_refused() {
        let new = |text: &str| AdminToken::new("a", Role::Viewer, text);
        for short in ["", "0123456789abcdef", &"é".repeat(32), "with a space 7f3a9c51e02b8d46c2b8e64d"] {
            assert!(matches!(new(short), Err(BadToken::Short)), "{short}");
        }
        for weak in [
            &"a".repeat(64),
            &"ab".repeat(40),
            &"1234567890".repeat(4),
            "abcdefghijklmnopqrstuvwxyz0123456789",
            "password-password-password-password",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa7f3a",
        ] {
            assert!(matches!(new(weak), Err(BadToken::Weak)), "{weak}");
        }
        assert_eq!(AdminToken::find_equal(&two()), None);
        let third = token("carol", Role::Viewer, ALICE);
        assert_eq!(AdminToken::find_equal(&[two(), vec![third]].concat()), Some(("alice", "carol")));
    }

    /// What `openssl rand -hex 16` makes, and the server at its first start.
    #[test]
    fn random_tokens_are_accepted() {
        let mut random = StdRng::seed_from_u64(7);
        let mut least = f64::MAX;
        for _ in 0..20_000 {
            let token = format!("{:032x}", random.random::<u128>());
            least = least.min(apparent_bits(token.as_bytes()));
            assert!(AdminToken::new("a", Role::Viewer, token.as_str()).is_ok(), "{token}");
        }
        assert!(least > MIN_BITS + 5.0, "{least} bits are close to the bound");
    }

    #[test]
    fn an_address_that_guesses_is_limited_and_others_are_not() {
        let limit = Limit { count: 3, window: Duration::from_secs(3600) };
        let all = Administrators::new(two(), limit, 100);
        let [office, attacker, home]: [IpAddr; 3] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|ip| ip.parse().unwrap());
        let name = |address, token| all.authenticate(address, token).map(|(name, _)| name.to_string());
        assert_eq!(name(office, ALICE), Ok("alice".into()));
        for address in [office, attacker] {
            for _ in 0..3 {
                assert_eq!(name(address, "wrong"), Err(Refused::Wrong));
            }
            assert!(matches!(name(address, "wrong"), Err(Refused::Limited { .. })));
        }
        assert!(matches!(name(attacker, ALICE), Err(Refused::Limited { .. })), "a guess too late");
        assert_eq!(name(home, ALICE), Ok("alice".into()), "another address");
        assert_eq!(name(office, ALICE), Ok("alice".into()), "accepted from there before");
        assert!(matches!(name(office, BOB), Err(Refused::Limited { .. })), "not accepted from there before");
        all.replace(vec![token("alice", Role::Operator, BOB)]);
        assert_eq!(name(office, BOB), Ok("alice".into()), "her new token");
        assert!(matches!(name(home, ALICE), Err(Refused::Wrong)), "her old token");
    }
}
