//! Who administers: named tokens with roles. Never shown, compared in constant time.

use std::fmt;
use std::sync::Arc;

use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

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

impl AdminToken {
    pub fn new(name: impl Into<Arc<str>>, role: Role, token: impl Into<String>) -> Self {
        Self { name: name.into(), role, token: token.into() }
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.name, self.role)
    }
}

/// Whose token is it? Every one is compared, whether or not one was right before.
pub(crate) fn find<'a>(tokens: &'a [AdminToken], token: &str) -> Option<(&'a Arc<str>, Role)> {
    let (mut found, mut place) = (Choice::from(0), 0u64);
    for (n, known) in (0u64..).zip(tokens) {
        let same = known.token.as_bytes().ct_eq(token.as_bytes());
        place = u64::conditional_select(&place, &n, same);
        found |= same;
    }
    let place = usize::try_from(place).ok()?;
    bool::from(found).then(|| (&tokens[place].name, tokens[place].role))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_is_its_own() {
        let tokens = [
            AdminToken::new("alice", Role::Operator, "token-of-alice"),
            AdminToken::new("bob", Role::Viewer, "token-of-bob"),
        ];
        let who = |token| find(&tokens, token).map(|(name, role)| (name.to_string(), role));
        assert_eq!(who("token-of-alice"), Some(("alice".into(), Role::Operator)));
        assert_eq!(who("token-of-bob"), Some(("bob".into(), Role::Viewer)));
        for wrong in ["", "token-of", "token-of-bobby", "TOKEN-OF-BOB"] {
            assert_eq!(who(wrong), None);
        }
        assert!(!format!("{tokens:?}").contains("token-of"));
    }
}
