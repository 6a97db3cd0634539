//! The thread as the owner.
//!
//! Adds: the value is the number of the thread that acquired the lock, and it is deleted only if the value is that number.
//! Wrong: every process counts its threads from one. A thread of another node has the same number, so its lock passes the check too.
//! Next: a random owner, which no other node has.

use redis::Script;

use super::{LEASE, NodeLock, Scenario};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/thread-id",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "threads of different nodes have the same number",
    needs: &[ServerKind::Redis],
    source: include_str!("thread_id.rs"),
    story_zh: "值里写加锁线程的编号，释放时编号一致才删除。\n\
        问题：每个进程的线程都从 1 编号，别的节点上同号线程的锁会被当成自己的删掉。\n\
        下一版：用随机的持有者标识（如 UUID）。",
    run: |lab, version| {
        Box::pin(super::scenarios::<ThreadId>(lab, version, &[Scenario::DeadHolder, Scenario::LateRelease]))
    },
};

const COMPARE_AND_DELETE: &str = r"
    if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
    return 0";

/// The first thread of every process.
const THREAD: &str = "1";

struct ThreadId {
    redis: CountedRedis,
    site: Site,
}

impl NodeLock for ThreadId {
    type Held = String;

    async fn connect(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Self::Held>> {
        let key = format!("lock:{user}");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(THREAD).arg("NX").arg("PX").arg(LEASE.as_millis().to_string());
        let set: Option<String> = set.query_async(&mut self.redis.clone()).await?;
        if set.is_none() {
            return Ok(None);
        }
        self.site.kill.pass().await;
        Ok(Some(key))
    }

    async fn release(&self, key: Self::Held) -> Result<()> {
        self.site.race.pass().await;
        let script = Script::new(COMPARE_AND_DELETE);
        let _: u64 = script.key(key).arg(THREAD).invoke_async(&mut self.redis.clone()).await?;
        Ok(())
    }
}
