//! A Lua script.

use std::borrow::Cow;

use redis::{Cmd, ToRedisArgs};

/// A Lua script and its SHA-1 hash, by which Redis calls it once it is loaded.
#[derive(Debug)]
pub struct Script {
    text: Cow<'static, str>,
    hash: String,
}

impl Script {
    /// Computes the hash of the text; nothing is sent.
    pub fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// The SHA-1 hash of the text, as `EVALSHA` and `SCRIPT EXISTS` take it.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    pub(crate) fn eval_sha<K: ToRedisArgs, A: ToRedisArgs>(&self, keys: &[K], args: &[A]) -> Cmd {
        call("EVALSHA", &self.hash, keys, args)
    }

    pub(crate) fn eval<K: ToRedisArgs, A: ToRedisArgs>(&self, keys: &[K], args: &[A]) -> Cmd {
        call("EVAL", &self.text, keys, args)
    }

    pub(crate) fn load(&self) -> Cmd {
        redis::cmd("SCRIPT").arg("LOAD").arg(&*self.text).to_owned()
    }
}

fn call<K: ToRedisArgs, A: ToRedisArgs>(name: &'static str, script: &str, keys: &[K], args: &[A]) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(keys.len()).arg(keys).arg(args);
    command
}
