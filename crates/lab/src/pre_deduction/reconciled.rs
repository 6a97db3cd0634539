//! Roll back by order in the background, and reconcile.
//!
//! Adds: the mark of a user holds the id of their order, and a roll-back removes exactly that mark, however often it is repeated. It runs in
//! the background. A job compares the marks with the database and rolls back what a dead node has left.
//! Wrong: nothing is lost, but every order still waits for its transaction in the database.
//! Next: the family queues answers the buyer first and writes to the database later.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use redis::{AsyncCommands as _, Script};
use sqlx::MySqlPool;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::ROLL_BACK_TIMEOUT;
use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "pre-deduction/reconciled",
    family: Family::PreDeduction,
    expected: Expected::Sound,
    because: "a roll-back undoes its own order only, and reconciling finds the ones that were missed",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("reconciled.rs"),
    story_zh: "用户标记里存订单号，回滚只删除自己那一单的标记，重复多少次都一样；回滚在后台执行，\
        节点宕机漏掉的由对账任务比对 Redis 和数据库后补上。\n\
        问题：结果正确，但每个订单仍要同步等数据库事务。\n\
        下一步：“异步下单”先应答用户，再写数据库。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 2 end
    local stock = tonumber(redis.call('GET', KEYS[1]))
    if stock == nil or stock < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
    return 0";

const ROLL_BACK: &str = r"
    if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
    redis.call('HDEL', KEYS[2], ARGV[1])
    redis.call('INCR', KEYS[1])
    return 1";

const TRIES: u32 = 3;
/// Ids that a node can make. The number of the node is above them, so that two nodes make different ones.
const IDS_OF_NODE: u64 = 1 << 40;

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = race_and_load::<Reconciled>(lab, version, Crowd::RACE_FOR_STOCK, 2).await?;
    super::with_rejections::<Reconciled>(lab, version, &mut measured).await?;
    super::with_late_roll_back::<Reconciled>(lab, version, &mut measured).await?;
    super::with_dead_node::<Reconciled>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct Reconciled {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
    next_order: AtomicU64,
    roll_backs: Mutex<JoinSet<Result<()>>>,
}

async fn call(redis: &CountedRedis, script: &str, user: u64, order: u64) -> Result<u8> {
    let script = Script::new(script);
    Ok(script.key("stock").key("buyers").arg(user).arg(order).invoke_async(&mut redis.clone()).await?)
}

/// What is not answered after some tries is left to the job that reconciles.
async fn roll_back(redis: CountedRedis, site: Site, user: u64, order: u64) -> Result<()> {
    site.before_roll_back.pass().await;
    for _ in 0..TRIES {
        match timeout(ROLL_BACK_TIMEOUT, call(&redis, ROLL_BACK, user, order)).await {
            Ok(rolled_back) => return rolled_back.map(drop),
            Err(_) => site.before_retry.pass().await,
        }
    }
    Ok(())
}

impl Reconciled {
    /// Rolls back the marks whose orders are not in the database, and returns how many. No request is under way here; otherwise it would
    /// act on marks that two comparisons, some seconds apart, have found.
    async fn reconcile(&self) -> Result<u64> {
        let marks: HashMap<u64, u64> = self.redis.clone().hgetall("buyers").await?;
        let rows: Vec<(i64,)> = sqlx::query_as("SELECT id FROM orders").fetch_all(&self.db).await?;
        let rows: HashSet<u64> = rows.into_iter().map(|(id,)| id.unsigned_abs()).collect();
        let mut rolled_back = 0;
        for (user, order) in marks.into_iter().filter(|(_, order)| !rows.contains(order)) {
            rolled_back += u64::from(call(&self.redis, ROLL_BACK, user, order).await?);
        }
        Ok(rolled_back)
    }
}

impl Shop for Reconciled {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let node: u64 = redis.incr("nodes", 1).await?;
        let (next_order, roll_backs) = (AtomicU64::new(node * IDS_OF_NODE), Mutex::default());
        Ok(Self { db: site.db()?, redis, site: site.clone(), next_order, roll_backs })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        let order = self.next_order.fetch_add(1, Ordering::Relaxed);
        match call(&self.redis, ADMIT, user, order).await? {
            1 => return Ok(Answer::SoldOut),
            2 => return Ok(Answer::AlreadyBought),
            _ => {}
        }
        self.site.kill.pass().await;
        let insert = sqlx::query("INSERT INTO orders (id, user_id) VALUES (?, ?)").bind(order).bind(user);
        match insert.execute(&self.db).await {
            Ok(_) => Ok(Answer::Bought),
            Err(sqlx::Error::Database(_)) => {
                self.roll_backs.lock().spawn(roll_back(self.redis.clone(), self.site.clone(), user, order));
                Ok(Answer::Rejected)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn settle(&self) -> Result<()> {
        let mut roll_backs = std::mem::take(&mut *self.roll_backs.lock());
        while let Some(rolled_back) = roll_backs.join_next().await {
            rolled_back.map_err(|error| Error::Failed(error.to_string()))??;
        }
        self.reconcile().await.map(drop)
    }
}
