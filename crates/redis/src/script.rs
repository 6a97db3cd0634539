//! A Lua script.

use redis::{Cmd, ToRedisArgs};

/// A script, and the hash that Redis knows it by once it has seen it.
#[derive(Debug)]
pub struct Script {
    text: &'static str,
    hash: String,
}

impl Script {
    /// From its text.
    pub fn new(text: &'static str) -> Self {
        Self { text, hash: redis::Script::new(text).get_hash().to_owned() }
    }

    pub(crate) fn by_hash<K: ToRedisArgs, A: ToRedisArgs>(&self, keys: &[K], args: &[A]) -> Cmd {
        call("EVALSHA", &self.hash, keys, args)
    }

    pub(crate) fn by_text<K: ToRedisArgs, A: ToRedisArgs>(&self, keys: &[K], args: &[A]) -> Cmd {
        call("EVAL", self.text, keys, args)
    }
}

fn call<K: ToRedisArgs, A: ToRedisArgs>(name: &'static str, what: &str, keys: &[K], args: &[A]) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(what).arg(keys.len()).arg(keys).arg(args);
    command
}
