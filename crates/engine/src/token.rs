//! The token of a session: session id, user id and a MAC over both, so that junk is refused without asking any store.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use stampede_core::UserId;
use stampede_core::ports::SessionId;
use subtle::ConstantTimeEq as _;

const MAC_BYTES: usize = 16;
const BYTES: usize = 16 + 8 + MAC_BYTES;
/// How long a token is as text.
const TEXT_BYTES: usize = 54;

/// Seals tokens and login codes.
#[derive(Clone)]
pub(crate) struct Sealer(Hmac<Sha256>);

impl Sealer {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        // HMAC pads a short key with zeros to its block.
        let mut block = [0; 64];
        block[..32].copy_from_slice(key);
        Self(Hmac::new(&block.into()))
    }

    fn mac(&self, purpose: u8, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = self.0.clone();
        mac.update(&[purpose]);
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
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

    /// Whose token is it? `None` for one that we did not make.
    pub(crate) fn open(&self, token: &str) -> Option<(SessionId, UserId)> {
        if token.len() != TEXT_BYTES {
            return None;
        }
        let mut bytes = [0; BYTES];
        let length = URL_SAFE_NO_PAD.decode_slice(token, &mut bytes).ok()?;
        let session: [u8; 16] = bytes[..16].try_into().ok()?;
        let user: [u8; 8] = bytes[16..24].try_into().ok()?;
        let mac = self.mac(b't', &[&session, &user]);
        let genuine = length == BYTES && bool::from(mac[..MAC_BYTES].ct_eq(&bytes[24..]));
        let user = UserId::new(i64::from_be_bytes(user)).ok()?;
        genuine.then_some((SessionId(session), user))
    }

    /// What is kept of a login code: bound to its phone, and useless without the key.
    pub(crate) fn code(&self, phone: &str, code: &str) -> [u8; 32] {
        self.mac(b'c', &[phone.as_bytes(), code.as_bytes()])
    }
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sealer(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_token_opens_and_no_other_text_does() {
        let sealer = Sealer::new(&[1; 32]);
        let (session, user) = (SessionId([7; 16]), UserId::new(42).unwrap());
        let token = sealer.token(session, user);
        assert_eq!(token.len(), TEXT_BYTES);
        assert_eq!(sealer.open(&token), Some((session, user)));
        assert_eq!(Sealer::new(&[2; 32]).open(&token), None, "another key");
        for place in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[place] = if changed[place] == b'A' { b'B' } else { b'A' };
            assert_eq!(sealer.open(std::str::from_utf8(&changed).unwrap()), None, "changed at {place}");
        }
    }

    proptest! {
        #[test]
        fn junk_never_opens(junk in ".{0,80}", bytes in proptest::collection::vec(any::<u8>(), 40)) {
            let sealer = Sealer::new(&[1; 32]);
            prop_assert_eq!(sealer.open(&junk), None);
            prop_assert_eq!(sealer.open(&URL_SAFE_NO_PAD.encode(bytes)), None);
        }
    }
}
