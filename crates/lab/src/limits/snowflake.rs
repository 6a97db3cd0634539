//! Ids by snowflake.
//!
//! Adds: 41 bits of milliseconds, 10 bits of the node, 12 bits of a counter. No server is asked, and ids are roughly in the order of time.
//! Wrong: two nodes with the same number make the same ids, and so does a clock that goes back.
//! Next: Stampede leases the number of a node from the ledger, and makes no ids until the clock has passed the last one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::{IdMaker, make_ids};
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/snowflake",
    family: Family::Limits,
    expected: Expected::Sound,
    because: "the number of the node is part of the id, and a node waits for the next millisecond when its numbers are used up",
    needs: &[],
    source: include_str!("snowflake.rs"),
    story_zh: "41 位毫秒、10 位节点号、12 位计数，不访问任何服务器，大致按时间有序。\n\
        问题：两个节点配了同一个节点号，或者时钟回拨，都会产生重复 ID。\n\
        下一步：Stampede 的节点号由账本租出，时钟没走过上一个 ID 之前不再发号。",
    run: |lab, version| Box::pin(make_ids::<Snowflake>(lab, version)),
};

/// 2022-01-01 in UTC.
const BEGIN_MS: u64 = 1_640_995_200_000;
const COUNTER_BITS: u32 = 12;
const NODE_BITS: u32 = 10;

struct Snowflake {
    node: u64,
    /// The last millisecond, and the next counter in it.
    last: Mutex<(u64, u64)>,
}

impl Snowflake {
    /// `None` if the numbers of this millisecond are used up.
    fn make(&self) -> Option<u64> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let now = u64::try_from(now).unwrap_or(u64::MAX).saturating_sub(BEGIN_MS);
        let mut last = self.last.lock();
        // A clock that went back counts as one that stands still.
        if now > last.0 {
            *last = (now, 0);
        }
        let (ms, counter) = *last;
        last.1 += 1;
        (counter < 1 << COUNTER_BITS).then_some(((ms << NODE_BITS | self.node) << COUNTER_BITS) | counter)
    }
}

impl IdMaker for Snowflake {
    async fn open(_: &Site, node: u64) -> Result<Self> {
        Ok(Self { node, last: Mutex::new((0, 0)) })
    }

    async fn next(&self) -> Result<u64> {
        loop {
            match self.make() {
                Some(id) => return Ok(id),
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }
}
