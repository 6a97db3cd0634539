//! Users and their phone numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::UserId;

/// A mobile number of mainland China, checked. Shown masked wherever it is logged.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Phone(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a phone number: expected 11 digits that start with 13 to 19")]
pub struct InvalidPhone;

impl Phone {
    pub fn parse(text: &str) -> Result<Self, InvalidPhone> {
        let digits = text.as_bytes();
        let good = digits.len() == 11
            && digits.iter().all(u8::is_ascii_digit)
            && digits[0] == b'1'
            && (b'3'..=b'9').contains(&digits[1]);
        if good { Ok(Self(text.to_owned())) } else { Err(InvalidPhone) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Phone {
    type Error = InvalidPhone;
    fn try_from(text: String) -> Result<Self, InvalidPhone> {
        Self::parse(&text)
    }
}

impl From<Phone> for String {
    fn from(phone: Phone) -> Self {
        phone.0
    }
}

impl fmt::Display for Phone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}****{}", &self.0[..3], &self.0[7..])
    }
}

impl fmt::Debug for Phone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// After this many tries at a phone's codes without a login, over all its challenges, new codes are longer until a login succeeds.
pub const LONG_CODES_AFTER: u32 = 100;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub id: UserId,
    pub phone: Phone,
    pub nickname: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phones_are_checked_and_masked() {
        for bad in
            ["", "1380013800", "138001380000", "12800138000", "23800138000", "1380013800x", "１３８００１３８０００"]
        {
            assert_eq!(Phone::parse(bad), Err(InvalidPhone), "{bad:?}");
        }
        let phone = Phone::parse("13800138000").unwrap();
        assert_eq!(format!("{phone} {phone:?}"), "138****8000 138****8000");
    }
}
