//! The token of a session: session id, user id and a MAC over both, so that a forged token is refused without asking any store.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stampede_core::ports::{ChallengeId, SessionId};
use stampede_core::{Phone, UserId};
use subtle::ConstantTimeEq as _;

const MAC_BYTES: usize = 16;
const BYTES: usize = 16 + 8 + MAC_BYTES;
/// How long a token is as text.
const TEXT_BYTES: usize = 54;

/// The keys that sign tokens. Tokens of the previous key are still accepted, so that a key can be changed without
/// ending all sessions.
#[derive(Clone, Copy)]
pub struct SessionKeys {
    pub current: [u8; 32],
    pub previous: Option<[u8; 32]>,
}

impl std::fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionKeys(…)")
    }
}

/// Signs tokens, login codes and puzzles with the current key, and accepts signatures of the current and the previous key.
#[derive(Clone)]
pub(crate) struct TokenSigner {
    current: Hmac<Sha256>,
    previous: Option<Hmac<Sha256>>,
}

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    // HMAC pads a short key with zeros to its block.
    let mut block = [0; 64];
    block[..32].copy_from_slice(key);
    Hmac::new(&block.into())
}

fn mac(key: &Hmac<Sha256>, purpose: u8, parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = key.clone();
    mac.update(&[purpose]);
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

impl TokenSigner {
    pub(crate) fn new(current: &[u8; 32], previous: Option<&[u8; 32]>) -> Self {
        Self { current: keyed(current), previous: previous.map(keyed) }
    }

    fn mac(&self, purpose: u8, parts: &[&[u8]]) -> [u8; 32] {
        mac(&self.current, purpose, parts)
    }

    /// Whether `given` is the MAC of this under one of the keys, or a prefix of it.
    fn is_mac(&self, purpose: u8, parts: &[&[u8]], given: &[u8]) -> bool {
        let made_by = |key: &Hmac<Sha256>| {
            let made = mac(key, purpose, parts);
            made.get(..given.len()).is_some_and(|made| !given.is_empty() && bool::from(made.ct_eq(given)))
        };
        made_by(&self.current) || self.previous.as_ref().is_some_and(made_by)
    }

    pub(crate) fn token(&self, session: SessionId, user: UserId) -> String {
        let user = user.get().to_be_bytes();
        let mac = self.mac(b't', &[&session.0, &user]);
        let mut bytes = [0; BYTES];
        bytes[..16].copy_from_slice(&session.0);
        bytes[16..24].copy_from_slice(&user);
        bytes[24..].copy_from_slice(&mac[..MAC_BYTES]);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The session and user of a token; `None` if its signature is wrong.
    pub(crate) fn open(&self, token: &str) -> Option<(SessionId, UserId)> {
        if token.len() != TEXT_BYTES {
            return None;
        }
        let mut bytes = [0; BYTES];
        let length = URL_SAFE_NO_PAD.decode_slice(token, &mut bytes).ok()?;
        let session: [u8; 16] = bytes[..16].try_into().ok()?;
        let user: [u8; 8] = bytes[16..24].try_into().ok()?;
        let genuine = length == BYTES && self.is_mac(b't', &[&session, &user], &bytes[24..]);
        let user = UserId::new(i64::from_be_bytes(user)).ok()?;
        genuine.then_some((SessionId(session), user))
    }

    /// The MAC that is stored for a login code: bound to its phone and its challenge, and useless without the key.
    pub(crate) fn code(&self, phone: &Phone, challenge: ChallengeId, code: &str) -> [u8; 32] {
        self.mac(b'c', &[phone.as_str().as_bytes(), &challenge.0, code.as_bytes()])
    }

    pub(crate) fn is_code(&self, phone: &Phone, challenge: ChallengeId, code: &str, mac: &[u8]) -> bool {
        mac.len() == 32 && self.is_mac(b'c', &[phone.as_str().as_bytes(), &challenge.0, code.as_bytes()], mac)
    }

    /// A name for the phone from which its number cannot be found without the key.
    pub(crate) fn phone_name(&self, phone: &Phone) -> [u8; MAC_BYTES] {
        let mut name = [0; MAC_BYTES];
        name.copy_from_slice(&self.mac(b'n', &[phone.as_str().as_bytes()])[..MAC_BYTES]);
        name
    }

    pub(crate) fn puzzle(&self, content: &[u8]) -> [u8; MAC_BYTES] {
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&self.mac(b'p', &[content])[..MAC_BYTES]);
        mac
    }

    pub(crate) fn is_puzzle(&self, content: &[u8], mac: &[u8]) -> bool {
        mac.len() == MAC_BYTES && self.is_mac(b'p', &[content], mac)
    }
}

impl std::fmt::Debug for TokenSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenSigner(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_a_signed_token_opens() {
        let token_signer = TokenSigner::new(&[1; 32], None);
        let (session, user) = (SessionId([7; 16]), UserId::new(42).unwrap());
        let token = token_signer.token(session, user);
        assert_eq!(token.len(), TEXT_BYTES);
        assert_eq!(token_signer.open(&token), Some((session, user)));
        assert_eq!(TokenSigner::new(&[2; 32], None).open(&token), None, "another key");
        for place in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[place] = if changed[place] == b'A' { b'B' } else { b'A' };
            assert_eq!(token_signer.open(std::str::from_utf8(&changed).unwrap()), None, "changed at {place}");
        }
    }

    #[test]
    fn token_signed_with_the_previous_key_is_accepted_until_the_key_is_removed() {
        let (session, user) = (SessionId([7; 16]), UserId::new(42).unwrap());
        let (phone, challenge) = (Phone::parse("13800138000").unwrap(), ChallengeId([3; 16]));
        let (old, both) = (TokenSigner::new(&[1; 32], None), TokenSigner::new(&[2; 32], Some(&[1; 32])));
        let new = TokenSigner::new(&[2; 32], None);
        let (before, after) = (old.token(session, user), both.token(session, user));
        assert_ne!(before, after, "new tokens are signed with the new key");
        assert_eq!(both.open(&before), Some((session, user)));
        assert_eq!(both.open(&after), Some((session, user)));
        assert_eq!(new.open(&before), None);
        assert_eq!(new.open(&after), Some((session, user)));
        let mac = old.code(&phone, challenge, "123456");
        assert!(both.is_code(&phone, challenge, "123456", &mac));
        assert!(!both.is_code(&phone, challenge, "123457", &mac));
        assert!(!both.is_code(&phone, ChallengeId([4; 16]), "123456", &mac), "another challenge");
        assert!(!new.is_code(&phone, challenge, "123456", &mac));
        assert!(!both.is_code(&phone, challenge, "123456", &[]), "an empty MAC");
    }

    proptest! {
        #[test]
        fn malformed_tokens_never_open(junk in ".{0,80}", bytes in proptest::collection::vec(any::<u8>(), 40)) {
            let token_signer = TokenSigner::new(&[1; 32], None);
            prop_assert_eq!(token_signer.open(&junk), None);
            prop_assert_eq!(token_signer.open(&URL_SAFE_NO_PAD.encode(bytes)), None);
        }
    }
}
