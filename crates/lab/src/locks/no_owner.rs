//! `SET NX PX` without an owner.
//!
//! Adds: the key and its expiry are set by one command. A node that dies leaves nothing for longer than the lease.
//! Wrong: a holder that was slow deletes the key even if its lease has ended and another node holds the lock now. A third node enters.
//! Next: the key names its owner, and only the owner deletes it.

use redis::AsyncCommands as _;

use super::{LEASE, NodeLock, Scenario};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/no-owner",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "anyone can delete the lock, also a holder whose lease has ended",
    needs: &[ServerKind::Redis],
    source: include_str!("no_owner.rs"),
    story_zh: "SET … NX PX 一条命令加锁并设过期，宕机最多占用一个租期。\n\
        问题：执行慢的持有者在租期结束后仍会删除键，删掉的是别人的锁，第三个节点趁机进入。\n\
        下一版：值里写上持有者，只有本人才能删除。",
    run: |lab, version| {
        Box::pin(super::scenarios::<NoOwner>(lab, version, &[Scenario::DeadHolder, Scenario::LateRelease]))
    },
};

struct NoOwner {
    redis: CountedRedis,
    site: Site,
}

impl NodeLock for NoOwner {
    type Held = String;

    async fn connect(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Self::Held>> {
        let key = format!("lock:{user}");
        let mut set = redis::cmd("SET");
        set.arg(&key).arg("taken").arg("NX").arg("PX").arg(LEASE.as_millis().to_string());
        let set: Option<String> = set.query_async(&mut self.redis.clone()).await?;
        if set.is_none() {
            return Ok(None);
        }
        self.site.kill.pass().await;
        Ok(Some(key))
    }

    async fn release(&self, key: Self::Held) -> Result<()> {
        self.site.race.pass().await;
        let _: u64 = self.redis.clone().del(key).await?;
        Ok(())
    }
}
