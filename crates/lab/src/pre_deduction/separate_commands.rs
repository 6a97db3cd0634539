//! Deduct in Redis, command by command.
//!
//! Adds: stock and buyers in Redis. Requests that find no stock there, or whose user has bought already, never reach the database.
//! Wrong: checking and deducting are separate commands. Between them, other buyers check as well, and all of them deduct.
//! Next: a Lua script, which Redis executes as one step.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use crate::driver::{Answer, Crowd, Shop, race_and_load};
use crate::meter::CountedRedis;
use crate::run::Lab;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Measured, Result, Version};

pub const VERSION: Version = Version {
    name: "pre-deduction/separate-commands",
    family: Family::PreDeduction,
    expected: Expected::Flawed(Flaw::Oversold),
    because: "others check between the check and the deduction of one buyer",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("separate_commands.rs"),
    story_zh: "把库存和已购用户放进 Redis，没有库存或买过的人根本到不了数据库。\n\
        问题：判断和扣减是几条独立的命令，中间别人也能通过判断，于是一起扣减，超卖。\n\
        下一版：写成一个 Lua 脚本，由 Redis 原子执行。",
    run: |lab, version| Box::pin(run(lab, version)),
};

async fn run(lab: &Lab, version: &Version) -> Result<Measured> {
    let mut measured = race_and_load::<SeparateCommands>(lab, version, Crowd::RACE_FOR_STOCK, 2).await?;
    super::with_dead_node::<SeparateCommands>(lab, version, &mut measured).await?;
    Ok(measured)
}

struct SeparateCommands {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Shop for SeparateCommands {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        Ok(Self { db: site.db()?, redis, site: site.clone() })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        let mut redis = self.redis.clone();
        if redis.sismember("buyers", user).await? {
            return Ok(Answer::AlreadyBought);
        }
        let stock: i64 = redis.get("stock").await?;
        if stock < 1 {
            return Ok(Answer::SoldOut);
        }
        self.site.race.pass().await;
        let _: i64 = redis.decr("stock", 1).await?;
        let _: i64 = redis.sadd("buyers", user).await?;
        self.site.kill.pass().await;
        sqlx::query("INSERT INTO orders (user_id) VALUES (?)").bind(user).execute(&self.db).await?;
        Ok(Answer::Bought)
    }
}
