//! Fail-over with one master.
//!
//! Adds: a replica, which takes over if the master is lost.
//! Wrong: replication is asynchronous. A lock that the master has confirmed may not have reached the replica, which then grants it again.
//! Next: the same lock on several masters that do not depend on each other.

use stampede_lock::Owner;

use super::failover::{Masters, acquired, judge};
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/one-master",
    family: Family::Locks,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "the replica that took over never got the lock",
    needs: &[ServerKind::Redis],
    source: include_str!("one_master.rs"),
    story_zh: "给 Redis 加一个从节点，主节点宕机时由它接管。\n\
        问题：主从复制是异步的，主节点已确认的锁可能还没到从节点，接管之后又发给了别人。\n\
        下一版：在多个互不依赖的主节点上同时加锁。",
    run: |lab, version| Box::pin(run(lab, version)),
};

async fn run(_: &Lab, _: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let masters = Masters::start(1).await?;
    masters.cut_replication()?;
    let before = masters.connect().await?;
    let load = || async { before[0].reentrant("load", &Owner::new())?.lock().await?.release().await };
    masters.load(&mut measured, load).await?;
    let first = before[0].reentrant("order", &Owner::new())?.lock().await?;
    let after = masters.fail_over().await?;
    let second = acquired(after[0].reentrant("order", &Owner::new())?.try_lock().await)?;
    judge(&mut measured, first.is_valid(), second.is_some())?;
    Ok(measured)
}
