//! `SETNX`, then `EXPIRE`.
//!
//! Adds: a lock that all nodes see: the key exists or it does not. An expiry frees it if its holder dies.
//! Wrong: a node that dies between the two commands leaves a key that never expires. That user can never buy again.
//! Next: `SET … NX PX`, which does both in one command.

use redis::AsyncCommands as _;

use super::{LEASE, NodeLock, Scenario};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/setnx-expire",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Leaked),
    because: "a node that dies between the two commands leaves a key without expiry",
    needs: &[ServerKind::Redis],
    source: include_str!("setnx_expire.rs"),
    story_zh: "所有节点共用的锁：键存在就是被占用；再设过期时间，防止持有者宕机后锁不释放。\n\
        问题：两条命令之间宕机，键就永不过期，这个用户再也下不了单。\n\
        下一版：SET … NX PX，一条命令完成。",
    run: |lab, version| Box::pin(super::scenarios::<SetnxExpire>(lab, version, &[Scenario::DeadHolder])),
};

struct SetnxExpire {
    redis: CountedRedis,
    site: Site,
}

impl NodeLock for SetnxExpire {
    type Held = String;

    async fn connect(site: &Site) -> Result<Self> {
        Ok(Self { redis: site.redis()?, site: site.clone() })
    }

    async fn acquire(&self, user: u64) -> Result<Option<Self::Held>> {
        let (mut redis, key) = (self.redis.clone(), format!("lock:{user}"));
        if !redis.set_nx(&key, 1).await? {
            return Ok(None);
        }
        self.site.kill.pass().await;
        let lease_ms = i64::try_from(LEASE.as_millis()).unwrap_or(i64::MAX);
        let _: bool = redis.pexpire(&key, lease_ms).await?;
        Ok(Some(key))
    }

    async fn release(&self, key: Self::Held) -> Result<()> {
        self.site.race.pass().await;
        let _: u64 = self.redis.clone().del(key).await?;
        Ok(())
    }
}
