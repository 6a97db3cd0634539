//! Delete the cached value, then change the database.
//!
//! Adds: a change deletes the cached value, so that the next reader loads the new one.
//! Wrong: a reader that comes between the two steps loads the old value and caches it again. It stays until it expires.
//! Next: the other order.

use redis::AsyncCommands as _;
use sqlx::MySqlPool;

use super::{QUERY, Reader, Writer, change_while_reading, key};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Flaw, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/delete-first",
    family: Family::Reads,
    expected: Expected::Flawed(Flaw::Stale),
    because: "a reader cached the old name between the deletion and the change",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("delete_first.rs"),
    story_zh: "更新时先删缓存再改数据库。\n\
        问题：两步之间来的读请求会把旧值重新放进缓存，直到过期都是旧数据。\n\
        下一版：换个顺序。",
    run: |lab, version| Box::pin(change_while_reading::<DeleteFirst>(lab, version)),
};

const EXPIRY_MS: u64 = 60_000;

struct DeleteFirst {
    db: MySqlPool,
    redis: CountedRedis,
    site: Site,
}

impl Reader for DeleteFirst {
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

impl Writer for DeleteFirst {
    async fn rename(&self, id: u64, name: &str) -> Result<()> {
        let _: u64 = self.redis.clone().del(key(id)).await?;
        self.site.race.pass().await;
        sqlx::query("UPDATE shop SET name = ? WHERE id = ?").bind(name).bind(id).execute(&self.db).await?;
        Ok(())
    }
}
