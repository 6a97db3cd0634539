//! Ids by blocks from Redis.
//!
//! Adds: a node takes 1,000 numbers at once and hands them out from memory. One call of Redis per 1,000 ids.
//! Wrong: ids of different nodes are not in the order of time, and a node that dies wastes the rest of its block.
//! Next: snowflakes need no server at all.

use redis::AsyncCommands as _;
use tokio::sync::Mutex;

use super::{IdMaker, make_ids};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "limits/blocks",
    family: Family::Limits,
    expected: Expected::Sound,
    because: "no two nodes have the same block",
    needs: &[ServerKind::Redis],
    source: include_str!("blocks.rs"),
    story_zh: "号段模式：一次从 Redis 取 1000 个号，在内存里分发，一千个 ID 才访问一次 Redis。\n\
        问题：不同节点的 ID 不按时间排序，节点宕机浪费剩下的号。\n\
        下一版：雪花算法完全不需要服务器。",
    run: |lab, version| Box::pin(make_ids::<Blocks>(lab, version)),
};

const BLOCK: u64 = 1_000;

struct Blocks {
    redis: CountedRedis,
    /// The next number, and the end of the block.
    block: Mutex<(u64, u64)>,
}

impl IdMaker for Blocks {
    async fn open(site: &Site, _: u64) -> Result<Self> {
        Ok(Self { redis: site.redis()?, block: Mutex::new((0, 0)) })
    }

    async fn next(&self) -> Result<u64> {
        let mut block = self.block.lock().await;
        if block.0 == block.1 {
            let end: u64 = self.redis.clone().incr("ids", BLOCK).await?;
            *block = (end - BLOCK, end);
        }
        block.0 += 1;
        Ok(block.0)
    }
}
