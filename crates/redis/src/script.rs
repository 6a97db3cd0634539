//! A Lua script.

/// A script, and the hash that Redis knows it by once it has seen it.
#[derive(Debug)]
pub struct Script {
    pub(crate) text: &'static str,
    pub(crate) hash: String,
}

impl Script {
    /// From its text.
    pub fn new(text: &'static str) -> Self {
        Self { text, hash: redis::Script::new(text).get_hash().to_owned() }
    }
}
