//! The number of repetitions: the full number with the environment variable `SOAK` set, fewer otherwise.

pub fn count(full: u64, fast: u64) -> u64 {
    if std::env::var_os("SOAK").is_some() { full } else { fast }
}
