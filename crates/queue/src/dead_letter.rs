//! Messages that could not be read, as operators see them.

use std::fmt;
use std::str::FromStr;

/// A message in the dead-letter queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// Names it.
    pub id: DeadLetterId,
    /// Why it is a dead letter.
    pub reason: String,
    /// What was delivered.
    pub bytes: Vec<u8>,
}

/// Names a dead letter by its content: 16 hexadecimal digits. Two with the same content have the same id; an action takes the older one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeadLetterId(u64);

impl DeadLetterId {
    /// The id of this content (FNV-1a).
    pub fn of(bytes: &[u8]) -> Self {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        Self(bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
    }
}

impl fmt::Display for DeadLetterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The text is not an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must have 16 hexadecimal digits")]
pub struct InvalidDeadLetterId;

impl FromStr for DeadLetterId {
    type Err = InvalidDeadLetterId;

    fn from_str(text: &str) -> Result<Self, InvalidDeadLetterId> {
        let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u64::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number.map(Self).ok_or(InvalidDeadLetterId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_read_as_it_is_shown() {
        let id = DeadLetterId::of(b"broken");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_ne!(id, DeadLetterId::of(b"broken!"));
        for text in ["", "12", "+123456789abcdef", "0123456789abcdefg", "0123456789abcde "] {
            assert_eq!(text.parse::<DeadLetterId>(), Err(InvalidDeadLetterId), "{text}");
        }
    }
}
