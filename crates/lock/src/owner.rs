//! Who holds a lock.

use std::fmt;
use std::sync::Arc;

use rand::RngExt as _;

/// Somebody who may hold re-entrant, fair and read-write locks: whoever has the same owner, or a clone of it, enters again instead of
/// waiting. Clone it into the tasks that work together; make a new one for work that must keep out of each other's way.
///
/// ```
/// use stampede_lock::Owner;
///
/// let me = Owner::new();
/// assert_eq!(me, me.clone());
/// assert_ne!(me, Owner::new());
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Owner(Arc<str>);

impl Owner {
    /// Somebody new: 128 random bits.
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

/// Who knows it could pass for the owner.
impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner")
    }
}

/// 128 random bits.
pub(crate) fn random_id() -> Arc<str> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let bits = rand::rng().random::<u128>();
    let text: [u8; 32] = std::array::from_fn(|at| DIGITS[(bits >> (4 * at)) as usize & 15]);
    std::str::from_utf8(&text).unwrap_or_default().into()
}
