//! How much: the full counts with the environment variable `SOAK` set, a part of them otherwise.

pub fn count(full: u64, fast: u64) -> u64 {
    if std::env::var_os("SOAK").is_some() { full } else { fast }
}
