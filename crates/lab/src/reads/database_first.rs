//! Change the database, then delete the cached value.
//!
//! Adds: whatever was cached before the change is deleted after it.
//! Wrong: a reader that loaded before the change can still cache after the deletion, which is rare; the expiry bounds it.
//! Next: `stampede-cache` gives each key a version, which closes that gap as well.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, Writer, change_while_reading, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/database-first",
    family: Family::Reads,
    expected: Expected::Sound,
    because: "the deletion comes after the change, so that what was cached before is gone",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("database_first.rs"),
    story_zh: "先改数据库再删缓存，改之前缓存的旧值都会被删掉。\n\
        问题：改之前查到旧值、删之后才写缓存的情况极少见，由过期时间兜底。\n\
        下一步：stampede-cache 给每个键编版本号，连这个空隙也堵上。",
    run: |lab, version| Box::pin(change_while_reading::<DatabaseFirst>(lab, version)),
};

const EXPIRY_MS: u64 = 60_000;

struct DatabaseFirst {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Reader for DatabaseFirst {
    async fn open(site: &Site) -> Result<Self> {
        Ok(Self { db: site.db()?, redis: site.redis()?, site: site.clone() })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let mut redis = self.redis.clone();
        if let Some(name) = redis.get(key(id)).await? {
            return Ok(Some(name));
        }
        let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&self.db).await?;
        let Some((name,)) = shop else { return Ok(None) };
        let _: () = redis.pset_ex(key(id), &name, EXPIRY_MS).await?;
        Ok(Some(name))
    }
}

impl Writer for DatabaseFirst {
    async fn rename(&self, id: u64, name: &str) -> Result<()> {
        sqlx::query("UPDATE shop SET name = ? WHERE id = ?").bind(name).bind(id).execute(&self.db).await?;
        self.site.race.pass().await;
        let _: u64 = self.redis.clone().del(key(id)).await?;
        Ok(())
    }
}
