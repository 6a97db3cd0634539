//! Fail-over with a multi-lock.
//!
//! Adds: three masters that do not depend on each other. The lock is held only if it is held on all of them.
//! Wrong: one master that does not answer is enough that nobody can acquire it.
//! Next: a majority is enough.

use stampede_lock::{Locks, MultiLock, Owner};

use super::failover::{Masters, acquired, judge, judge_released};
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::{Expected, Family, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/multi-lock",
    family: Family::Locks,
    expected: Expected::Sound,
    because: "the other masters still have the lock, and all are needed",
    needs: &[ServerKind::Redis],
    source: include_str!("multi_lock.rs"),
    story_zh: "联锁：在三个互不依赖的主节点上都拿到才算加锁成功。\n\
        问题：任何一个主节点不应答，谁都加不了锁。\n\
        下一版：拿到多数节点即可。",
    run: |lab, version| Box::pin(run(lab, version)),
};

async fn run(_: &Lab, _: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let masters = Masters::start(3).await?;
    masters.cut_replication()?;
    let before = masters.connect().await?;
    masters.load(&mut measured, || async { multi_lock(&before)?.lock().await?.release().await }).await?;
    let first = multi_lock(&before)?.lock().await?;
    let after = masters.fail_over().await?;
    let second = acquired(multi_lock(&after)?.try_lock().await)?;
    judge(&mut measured, first.is_valid(), second.is_some())?;
    // The master that is lost does not answer, and the others release the lock all the same.
    let _ = first.release().await;
    drop(second);
    let free = acquired(multi_lock(&after)?.try_lock().await)?;
    judge_released(&mut measured, free.is_some());
    Ok(measured)
}

fn multi_lock(masters: &[Locks]) -> Result<MultiLock, stampede_lock::Error> {
    let owner = Owner::new();
    let locks = masters.iter().map(|locks| locks.reentrant("order", &owner)).collect::<Result<Vec<_>, _>>()?;
    MultiLock::new(locks)
}
