//! Deduct in Redis with a script.
//!
//! Adds: a Lua script that checks the buyer and the stock and deducts, as one step. One call instead of four.
//! Wrong: if the database then rejects the order, Redis has deducted it all the same. That item is never sold, nor is
//! one whose node dies in between.
//! Next: the deduction is rolled back if the order cannot be inserted.

use redis::Script;
use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "pre-deduction/script",
    family: Family::PreDeduction,
    expected: Expected::Flawed(Flaw::Undersold),
    because: "what the database rejects stays deducted in Redis",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("script.rs"),
    story_zh: "用 Lua 脚本一步完成“查重、查库存、扣减、记录用户”，四次往返变成一次。\n\
        问题：数据库写订单失败时，Redis 里已经扣掉的库存没有还回去，少卖；扣减之后节点宕机也一样。\n\
        下一版：订单写不进去就回滚 Redis。",
    run: |lab, version| Box::pin(run(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    local stock = tonumber(redis.call('GET', KEYS[1]))
    if stock == nil or stock < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = race_and_load::<Scripted>(lab, version, Crowd::RACE_FOR_STOCK, 2).await?;
    super::with_rejections::<Scripted>(lab, version, &mut measured).await?;
    super::with_dead_node::<Scripted>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct Scripted {
    db: MySqlPool,
    redis: CountedRedis,
    admit: Script,
    site: Site,
}

impl Shop for Scripted {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        redis::cmd("SET").arg(&["stock", &site.stock.to_string(), "NX"]).exec_async(&mut redis).await?;
        Ok(Self { db: site.db()?, redis, admit: Script::new(ADMIT), site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        self.site.race.pass().await;
        let admitted: u8 =
            self.admit.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?;
        match admitted {
            1 => return Ok(Answer::SoldOut),
            2 => return Ok(Answer::AlreadyBought),
            _ => {}
        }
        self.site.kill.pass().await;
        match sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await {
            Ok(_) => Ok(Answer::Bought),
            Err(sqlx::Error::Database(_)) => Ok(Answer::Rejected),
            Err(error) => Err(error.into()),
        }
    }
}
