//! A Redis stream, read from `$`.
//!
//! Adds: a stream, which keeps its messages. `XREAD … $` waits for the next one.
//! Wrong: `$` is the end of the stream at the time of the call. Messages that arrive between two calls are never read, even without a crash.
//! Those that arrive while no node runs are not read either.
//! Next: a consumer group remembers what was read and what was acknowledged.

use std::sync::Arc;

use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;

use super::{Crash, QueuedShop, answer, crash, load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::{Site, connect};
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/stream-from-end",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "what arrives while an order is being written is before the next $",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("stream_from_end.rs"),
    story_zh: "用 Stream 保存消息，XREAD … $ 等待下一条。\n\
        问题：$ 指的是调用那一刻的末尾，两次调用之间到达的消息永远读不到，不用宕机就会漏单；节点宕机期间到达的也一样。\n\
        下一版：消费组会记住读到哪里、哪些已经确认。",
    run: |lab, version| Box::pin(run(lab, version)),
};

/// An id, and one field with its value.
type Entry = (String, (String, u64));

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    redis.call('XADD', KEYS[3], '*', 'user', ARGV[1])
    return 0";

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = Measured::default();
    // At its first order: a second one may never be read.
    crash::<StreamFromEnd>(lab, version, Crash::BeforeCommit, 1, &mut measured).await?;
    load::<StreamFromEnd>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct StreamFromEnd {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for StreamFromEnd {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let mut redis = self.redis.clone();
        let admitted = admit.key("stock").key("buyers").key("orders").arg(user).invoke_async(&mut redis).await?;
        Ok(answer(admitted))
    }
}

impl QueuedShop for StreamFromEnd {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut blocking = self.redis.counting(connect(&self.site.redis_client()?).await?);
        loop {
            let mut read = redis::cmd("XREAD");
            read.arg(&["COUNT", "1", "BLOCK", "1000", "STREAMS", "orders", "$"]);
            let read: Option<Vec<(String, Vec<Entry>)>> = read.query_async(&mut blocking).await?;
            for (_, (_, user)) in read.into_iter().flatten().flat_map(|(_, entries)| entries) {
                self.site.kill.pass().await;
                sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
            }
        }
    }

    /// The worker waits in `XREAD`.
    async fn is_listening(&self) -> Result<bool> {
        let clients: String = redis::cmd("INFO").arg("clients").query_async(&mut self.redis.clone()).await?;
        let waiting = clients.lines().find_map(|line| line.strip_prefix("blocked_clients:"));
        Ok(waiting.is_some_and(|count| count != "0"))
    }

    async fn queued(&self) -> Result<u64> {
        Ok(0)
    }
}
