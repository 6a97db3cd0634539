//! A queue in memory.
//!
//! Adds: the script in Redis decides, the order goes into a queue in the process, and the buyer is answered at once. A task writes the
//! orders to the database.
//! Wrong: what is in the queue when the process dies is gone, although the buyers have been told yes. The queue takes memory.
//! Next: the queue is a list in Redis, which survives the process.

use std::sync::Arc;

use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;
use tokio::sync::{Mutex, mpsc};

use super::{QueuedShop, answer, crash_and_load};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "queues/memory",
    family: Family::Queues,
    expected: Expected::Flawed(Flaw::Lost),
    because: "the queue dies with the process",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("memory.rs"),
    story_zh: "Redis 脚本判断资格，订单放进进程内的阻塞队列，立即应答用户，由后台任务写数据库。\n\
        问题：进程一死，队列里的订单全部丢失，而用户已经收到“成功”；队列还占用内存。\n\
        下一版：把队列放到 Redis 的 List 里，进程死了还在。",
    run: |lab, version| Box::pin(crash_and_load::<Memory>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

/// The queue has room for this many orders, or for the whole stock if that is more.
const MIN_CAPACITY: u64 = 100_000;

struct Memory {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    queue: mpsc::Sender<u64>,
    waiting: Mutex<mpsc::Receiver<u64>>,
}

impl Shop for Memory {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let capacity = usize::try_from(site.stock.max(MIN_CAPACITY)).unwrap_or(usize::MAX);
        let (queue, waiting) = mpsc::channel(capacity);
        Ok(Self { db: site.db()?, redis, site: site.clone(), queue, waiting: Mutex::new(waiting) })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let admit = Script::new(ADMIT);
        let admitted = admit.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?;
        if admitted == 0 {
            self.queue.try_send(user).map_err(|error| Error::Failed(error.to_string()))?;
        }
        Ok(answer(admitted))
    }
}

impl QueuedShop for Memory {
    async fn work(self: Arc<Self>) -> Result<()> {
        let mut waiting = self.waiting.lock().await;
        while let Some(user) = waiting.recv().await {
            self.site.kill.pass().await;
            sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
        }
        Ok(())
    }

    async fn queued(&self) -> Result<u64> {
        Ok((self.queue.max_capacity() - self.queue.capacity()) as u64)
    }
}
