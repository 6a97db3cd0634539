//! Roll back in Redis, by user.
//!
//! Adds: if the database rejects the order, a second script removes the user and returns the item, and is repeated if Redis does not answer.
//! Wrong: a roll-back that was executed but not answered in time is repeated. By then the user may have bought again, and the roll-back of
//! the first order takes away the mark of the second. The request waits for all of it, and a node that dies rolls nothing back.
//! Next: roll back by order, in the background, and compare Redis with the database for what is still missed.

use redis::Script;
use sqlx::MySqlPool;
use tokio::time::timeout;

use super::ROLL_BACK_TIMEOUT;
use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "pre-deduction/inline-roll-back",
    family: Family::PreDeduction,
    expected: Expected::Flawed(Flaw::Duplicated),
    because: "a repeated roll-back by user undid the user's next order",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("inline_roll_back.rs"),
    story_zh: "数据库拒绝订单时，再用一个脚本按用户回滚：删除已购标记、归还库存；Redis 没有应答就重试。\n\
        问题：回滚其实执行了，只是应答超时。等到重试时用户可能已经重新买到，重试就把新订单的标记删掉，一人两单；\
        而且整个回滚都在请求里等，节点宕机就没有人回滚。\n\
        下一版：按订单号回滚，放到后台执行，漏掉的由对账补上。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    local stock = tonumber(redis.call('GET', KEYS[1]))
    if stock == nil or stock < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

const ROLL_BACK: &str = r"
    if redis.call('SREM', KEYS[2], ARGV[1]) == 1 then redis.call('INCR', KEYS[1]) end
    return 0";

const TRIES: u32 = 5;

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = race_and_load::<InlineRollBack>(lab, version, Crowd::RACE_FOR_STOCK, 2).await?;
    super::with_rejections::<InlineRollBack>(lab, version, &mut measured).await?;
    super::with_late_roll_back::<InlineRollBack>(lab, version, &mut measured).await?;
    super::with_dead_node::<InlineRollBack>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct InlineRollBack {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl InlineRollBack {
    async fn call(&self, script: &str, user: u64) -> Result<u8> {
        let script = Script::new(script);
        Ok(script.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?)
    }

    async fn roll_back(&self, user: u64) -> Result<()> {
        self.site.before_roll_back.pass().await;
        for _ in 0..TRIES {
            match timeout(ROLL_BACK_TIMEOUT, self.call(ROLL_BACK, user)).await {
                Ok(rolled_back) => return rolled_back.map(drop),
                Err(_) => self.site.before_retry.pass().await,
            }
        }
        Err(Error::TimedOut("the roll-back"))
    }
}

impl Shop for InlineRollBack {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        redis::cmd("SET").arg(&["stock", &site.stock.to_string(), "NX"]).exec_async(&mut redis).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        match self.call(ADMIT, user).await? {
            1 => return Ok(Answer::SoldOut),
            2 => return Ok(Answer::AlreadyBought),
            _ => {}
        }
        self.site.kill.pass().await;
        match sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await {
            Ok(_) => Ok(Answer::Bought),
            Err(sqlx::Error::Database(_)) => self.roll_back(user).await.map(|()| Answer::Rejected),
            Err(error) => Err(error.into()),
        }
    }
}
