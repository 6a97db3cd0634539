//! Two levels.
//!
//! Adds: the cache of `stampede-cache`: a level in the process in front of Redis, one load for all concurrent readers on all nodes, empty
//! values, jitter, and messages that clear the local level when a value changes.
//! Wrong: memory per process, and a moment between a change and the message of it.
//! Next: Stampede caches its shops, vouchers and sales with it.

use std::time::Duration;

use sqlx::MySqlPool;
use stampede_cache::{Builder, Cache, Remote, RemoteConfig};

use super::{EXPIRY, QUERY, Reader, hot_missing_expired};
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Error, Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "reads/two-levels",
    family: Family::Reads,
    expected: Expected::Sound,
    because: "one load serves all concurrent readers, and most reads stay in the process",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("two_levels.rs"),
    story_zh: "使用 stampede-cache：Redis 前面再加一级进程内缓存，所有节点的并发读取共用一次加载，缓存空值，过期带随机数，\
        数据变更时用消息清除各节点的本地缓存。\n\
        问题：每个进程都占内存；变更后到消息到达之前有一个极短的窗口。\n\
        下一步：Stampede 的店铺、券和活动都用它缓存。",
    run: |lab, version| Box::pin(hot_missing_expired::<TwoLevels>(lab, version)),
};

const EMPTY_EXPIRY: Duration = Duration::from_secs(5);
const LOCAL_CAPACITY: u64 = 10_000;

struct TwoLevels {
    db: MySqlPool,
    shops: Cache<u64, String, sqlx::Error>,
}

impl Reader for TwoLevels {
    async fn open(site: &Site) -> Result<Self> {
        let remote = Remote::new("lab", site.redis_url()?, RemoteConfig::default())?;
        let shops = Builder::new("shop")
            .expire_after(EXPIRY)
            .expire_empty_after(EMPTY_EXPIRY)
            .local(LOCAL_CAPACITY, EXPIRY)
            .remote(remote)
            .build();
        Ok(Self { db: site.db()?, shops })
    }

    async fn read(&self, id: u64) -> Result<Option<String>> {
        let db = self.db.clone();
        let load = move || async move {
            let shop: Option<(String,)> = sqlx::query_as(QUERY).bind(id).fetch_optional(&db).await?;
            Ok(shop.map(|(name,)| name))
        };
        let shop = self.shops.get_or_load(&id, load).await.map_err(|error| Error::Failed(error.to_string()))?;
        Ok(shop.map(|name| name.to_string()))
    }
}
