//! Checks the header comments of Redis scripts.

use std::collections::BTreeSet;
use std::io::{Error, Result};
use std::path::Path;

/// Checks every `.lua` file of a directory: it begins with a comment that names exactly the `KEYS[n]` and `ARGV[n]` of the body and states
/// what the script returns. Returns the number of files.
pub fn check_headers(directory: impl AsRef<Path>) -> Result<usize> {
    let mut checked = 0;
    for file in std::fs::read_dir(directory)? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "lua") {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let (header, body): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("--"));
        let (header, body) = (header.join("\n"), body.join("\n"));
        if !text.starts_with(&header) || !header.contains("-- Returns ") {
            return Err(Error::other(format!("{path:?} has no header that states what it returns")));
        }
        if named(&header) != named(&body) {
            let (header, body) = (named(&header), named(&body));
            return Err(Error::other(format!("{path:?}: the header names {header:?}, the body uses {body:?}")));
        }
        checked += 1;
    }
    Ok(checked)
}

/// Every `KEYS[n]` and `ARGV[n]` with a literal number. Others (`KEYS[2…]`, `#KEYS`, a variable as the index) are ignored.
fn named(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for word in ["KEYS[", "ARGV["] {
        for (at, _) in text.match_indices(word) {
            let number: String = text[at + word.len()..].chars().take_while(char::is_ascii_digit).collect();
            let after = text[at + word.len() + number.len()..].chars().next();
            if !number.is_empty() && after == Some(']') {
                found.insert(format!("{word}{number}]"));
            }
        }
    }
    found
}
