//! A script that compares and deletes.
//!
//! Adds: the owner is compared and the key deleted in one step. Nobody deletes the lock of another node any more.
//! Wrong: the lease is fixed. If the work takes longer, the lock ends while its holder still works, and a second node enters.
//! Next: a watchdog renews the lease for as long as the holder lives.

use redis::Script;

use super::{LEASE, NodeLock, Scenario};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/compare-and-delete",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "nothing renews the lease",
    needs: &[ServerKind::Redis],
    source: include_str!("compare_and_delete.rs"),
    story_zh: "Lua 脚本一步完成比对和删除，再也不会误删别人的锁。\n\
        问题：租期固定，业务没做完锁就到期，第二个节点进来同时执行。\n\
        下一版：看门狗在持有期间自动续期。",
    run: |lab, version| {
        Box::pin(super::scenarios::<CompareAndDelete>(
            lab,
            version,
            &[Scenario::DeadHolder, Scenario::LateRelease, Scenario::LongWork],
        ))
    },
};

const COMPARE_AND_DELETE: &str = r"
    if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
    return 0";

struct CompareAndDelete {
    redis: CountedRedis,
    site: Site,
}

impl NodeLock for CompareAndDelete {
    type Held = (String, u64);

    async fn connect(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Self::Held>> {
        let (key, owner) = (format!("lock:{user}"), rand::random::<u64>());
        let mut set = redis::cmd("SET");
        set.arg(&key).arg(owner).arg("NX").arg("PX").arg(LEASE.as_millis().to_string());
        let set: Option<String> = set.query_async(&mut self.redis.clone()).await?;
        if set.is_none() {
            return Ok(None);
        }
        self.site.kill.pass().await;
        Ok(Some((key, owner)))
    }

    async fn release(&self, (key, owner): Self::Held) -> Result<()> {
        self.site.race.pass().await;
        let script = Script::new(COMPARE_AND_DELETE);
        let _: u64 = script.key(key).arg(owner).invoke_async(&mut self.redis.clone()).await?;
        Ok(())
    }
}
