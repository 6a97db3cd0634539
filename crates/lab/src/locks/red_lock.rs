//! Fail-over with a red lock.
//!
//! Adds: the lock is held if a majority of at least three masters has it. One that is lost, or comes back empty, changes nothing.
//! Wrong: nothing here, but it relies on clocks that run at about the same rate, and on a majority that keeps its data.
//! Next: a fencing token, which the database checks, for work that must never be done twice.

use stampede_lock::RedLock;

use super::failover::{Masters, acquired, judge, judge_released};
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::{Expected, Family, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "locks/red-lock",
    family: Family::Locks,
    expected: Expected::Sound,
    because: "the others are a majority, and they still have the lock",
    needs: &[ServerKind::Redis],
    source: include_str!("red_lock.rs"),
    story_zh: "红锁：在至少三个主节点中的多数上拿到就算成功，丢一个或空着回来一个都不影响。\n\
        问题：这里没有问题，但它依赖各节点时钟速率接近、且多数节点不丢数据。\n\
        下一步：绝不能做两次的操作，再由数据库校验围栏令牌。",
    run: |lab, version| Box::pin(run(lab, version)),
};

async fn run(_: &Lab, _: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    let masters = Masters::start(3).await?;
    masters.cut_replication()?;
    let before = masters.connect().await?;
    masters.load(&mut measured, || async { RedLock::new(&before, "load")?.lock().await?.release().await }).await?;
    let first = RedLock::new(&before, "order")?.lock().await?;
    let after = masters.fail_over().await?;
    let second = acquired(RedLock::new(&after, "order")?.try_lock().await)?;
    judge(&mut measured, first.is_valid(), second.is_some())?;
    // A majority confirms the release without the master that is lost.
    first.release().await?;
    drop(second);
    let free = acquired(RedLock::new(&after, "order")?.try_lock().await)?;
    judge_released(&mut measured, free.is_some());
    Ok(measured)
}
