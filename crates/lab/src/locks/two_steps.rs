//! A random owner, checked in two steps.
//!
//! Adds: the value is a random number. Before the key is deleted, its value is read and compared.
//! Wrong: the lease can end between reading and deleting, for example in a pause of the process. Then the lock of another node is deleted.
//! Next: a script compares and deletes in one step.

use redis::AsyncCommands as _;

use super::{LEASE, NodeLock, Scenario};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/two-steps",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "the lease ended between the check and the deletion",
    needs: &[ServerKind::Redis],
    source: include_str!("two_steps.rs"),
    story_zh: "值是随机标识，删除前先读出来比对。\n\
        问题：读和删是两步，中间如果进程停顿（例如 GC）租期正好结束，删掉的就是别人的锁。\n\
        下一版：用 Lua 脚本一步完成比对和删除。",
    run: |lab, version| {
        Box::pin(super::scenarios::<TwoSteps>(lab, version, &[Scenario::DeadHolder, Scenario::LateRelease]))
    },
};

struct TwoSteps {
    redis: CountedRedis,
    site: Site,
}

impl NodeLock for TwoSteps {
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
        let mut redis = self.redis.clone();
        let holder: Option<u64> = redis.get(&key).await?;
        if holder == Some(owner) {
            self.site.race.pass().await;
            let _: u64 = redis.del(&key).await?;
        }
        Ok(())
    }
}
