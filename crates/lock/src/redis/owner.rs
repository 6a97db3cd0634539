//! Lock owners.

use std::fmt;
use std::sync::Arc;

use rand::RngExt as _;

/// The owner of re-entrant, fair and read-write locks. Calls with the same owner, or a clone of it, re-enter a lock instead of waiting
/// for it. Clone it into tasks that work together; create a new one for work that must be mutually exclusive.
///
/// ```
/// use stampede_lock::Owner;
///
/// let owner = Owner::new();
/// assert_eq!(owner, owner.clone());
/// assert_ne!(owner, Owner::new());
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Owner(Arc<str>);

impl Owner {
    /// Creates a new owner, identified by 128 random bits.
    pub fn new() -> Self {
        Self(random_id())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Owner {
    fn default() -> Self {
        Self::new()
    }
}

/// Does not show the id: a client that knows it could act as the owner.
impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner")
    }
}

/// 128 random bits in hexadecimal.
pub(crate) fn random_id() -> Arc<str> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bits = rand::rng().random::<u128>();
    let text: [u8; 32] = std::array::from_fn(|at| DIGITS[(bits >> (4 * at)) as usize & 15]);
    std::str::from_utf8(&text).unwrap_or_default().into()
}
