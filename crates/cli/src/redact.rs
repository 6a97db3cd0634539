//! Removes credentials from URLs before they are shown in logs, errors or by `config show`.

use std::fmt;

use serde::Deserialize;

const HIDDEN: &str = "***";

/// A URL that may contain credentials, before an `@` or in its query. It is displayed without them.
#[derive(Clone, Default, Deserialize)]
#[serde(transparent)]
pub struct SecretUrl(String);

impl SecretUrl {
    /// The URL with its credentials.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<&str> for SecretUrl {
    fn from(url: &str) -> Self {
        Self(url.to_owned())
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.contains("://")
            && let Some(at) = self.0.rfind('@')
        {
            // Not a URL; perhaps its slashes were forgotten.
            return write!(f, "{HIDDEN}{}", &self.0[at..]);
        }
        match self.0.split_once(['?', '#']) {
            // A password that is not encoded may contain either character.
            Some((_, rest)) if rest.contains('@') => f.write_str(&without_credentials(&self.0)),
            Some((url, _)) => write!(f, "{}?{HIDDEN}", without_credentials(url)),
            None => f.write_str(&without_credentials(&self.0)),
        }
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Removes the credentials of all URLs in a text: what is between `://` and the last `@` before the next space or quotation mark.
pub fn without_credentials(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        shown.push_str(before);
        let end = url.find(|letter: char| letter.is_whitespace() || "\"'`".contains(letter)).unwrap_or(url.len());
        rest = match url[..end].rfind('@') {
            Some(at) => {
                shown.push_str(HIDDEN);
                &url[at..]
            }
            None if lacks_host(&url[..end]) => {
                shown.push_str(HIDDEN);
                &url[end..]
            }
            None => url,
        };
    }
    shown.push_str(rest);
    shown
}

/// Whether a URL without an `@` has what looks like a password in place of its host or port.
fn lacks_host(url: &str) -> bool {
    let authority = url.split(['/', '?', '#']).next().unwrap_or_default();
    let is_address = authority.ends_with(']');
    authority
        .rsplit_once(':')
        .is_some_and(|(host, port)| !is_address && (host.is_empty() || port.bytes().any(|byte| !byte.is_ascii_digit())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_of_a_url_are_not_shown() {
        for (url, shown) in [
            ("", ""),
            ("https://x/y", "https://x/y"),
            ("https://me:secret@x:8443/y", "https://***@x:8443/y"),
            ("https://secret@x/y", "https://***@x/y"),
            ("redis:me:secret@x", "***@x"),
            ("redis://:secret", "redis://***"),
            ("redis://:123456", "redis://***"),
            ("redis://me:secret/2", "redis://***"),
            ("redis://[::1]:6379/2", "redis://[::1]:6379/2"),
            ("redis://[::1]", "redis://[::1]"),
            ("redis://x:6379", "redis://x:6379"),
            ("https://me:sec@ret@x/y", "https://***@x/y"),
            ("https://me:sec/ret?@x/y", "https://***@x/y"),
            ("https://x/y?token=secret", "https://x/y?***"),
            ("https://me:secret@x/y?token=secret", "https://***@x/y?***"),
        ] {
            let url = SecretUrl::from(url);
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
        }
    }

    #[test]
    fn credentials_in_a_text_are_not_shown() {
        let text = "line 3: url = \"https://me:secret@x/y\", database = 'mysql://me:secret@h/d' mail me@x";
        let shown = "line 3: url = \"https://***@x/y\", database = 'mysql://***@h/d' mail me@x";
        assert_eq!(without_credentials(text), shown);
    }
}
