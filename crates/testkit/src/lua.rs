//! Scripts for Redis: the comment at their head says what the body uses.

use std::collections::BTreeSet;
use std::io::{Error, Result};
use std::path::Path;

/// Checks every `.lua` file of a folder: it begins with comments that name exactly the `KEYS[n]` and `ARGV[n]` of the body, and say what
/// it returns. Returns how many there were.
pub fn check_heads(folder: impl AsRef<Path>) -> Result<usize> {
    let mut checked = 0;
    for file in std::fs::read_dir(folder)? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "lua") {
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let (head, body): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("--"));
        let (head, body) = (head.join("\n"), body.join("\n"));
        if !text.starts_with(&head) || !head.contains("-- Returns ") {
            return Err(Error::other(format!("{path:?} has no head that says what it returns")));
        }
        if named(&head) != named(&body) {
            let (head, body) = (named(&head), named(&body));
            return Err(Error::other(format!("{path:?}: the head names {head:?}, the body uses {body:?}")));
        }
        checked += 1;
    }
    Ok(checked)
}

/// Every `KEYS[n]` and `ARGV[n]` with a number in a text. An open end (`KEYS[2…]`, `#KEYS`, a variable) is not a number.
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
