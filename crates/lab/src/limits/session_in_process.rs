//! The session in the process.
//!
//! Adds: after the login, the node keeps the session in its memory.
//! Wrong: behind a load balancer, the next request arrives at another node, which does not know the session.
//! And a session stays in memory for good.
//! Next: the session is in Redis.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::{Sessions, two_nodes};
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/session-in-process",
    family: Family::Limits,
    expected: Expected::Flawed(Flaw::LoggedOut),
    because: "the session is in the memory of the other node",
    needs: &[],
    source: include_str!("session_in_process.rs"),
    story_zh: "登录后会话保存在节点内存里。\n\
        问题：负载均衡把下一个请求分到别的节点，那里没有这个会话，用户“被登出”；会话还一直占着内存。\n\
        下一版：会话放进 Redis。",
    run: |lab, version| Box::pin(two_nodes::<InProcess>(lab, version)),
};

struct InProcess {
    sessions: Mutex<HashMap<String, u64>>,
}

impl Sessions for InProcess {
    async fn open(_: &Site) -> Result<Self> {
        Ok(Self { sessions: Mutex::default() })
    }

    async fn log_in(&self, user: u64) -> Result<String> {
        let token = format!("{:032x}", rand::random::<u128>());
        self.sessions.lock().insert(token.clone(), user);
        Ok(token)
    }

    async fn user(&self, token: &str) -> Result<Option<u64>> {
        Ok(self.sessions.lock().get(token).copied())
    }

    fn leaked(&self) -> Option<u64> {
        Some(self.sessions.lock().len() as u64)
    }
}
