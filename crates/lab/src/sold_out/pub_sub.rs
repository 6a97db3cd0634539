//! A local mark per node, with messages and an expiry.
//!
//! Adds: the sell-out and new stock are published, and every node sets or clears its mark. A mark expires, because a message can be lost.
//! Wrong: for as long as the expiry, a node that missed a message refuses buyers who could buy.
//! Next: the tier shielded of Stampede numbers the states of a sale, so that an old message cannot undo a newer one.

use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt as _;
use parking_lot::Mutex;
use redis::{AsyncCommands as _, Script};
use tokio::task::JoinSet;

use super::{EXPIRY, SoldOutShop, sell_out_and_top_up};
use crate::driver::{Answer, Shop};
use crate::meter::CountedRedis;
use crate::servers::ServerKind;
use crate::site::Site;
use crate::{Expected, Family, Result, Version};

pub const VERSION: Version = Version {
    name: "sold-out/pub-sub",
    family: Family::SoldOut,
    expected: Expected::Sound,
    because: "all nodes hear of the sell-out and of new stock, and a missed message costs at most the expiry",
    needs: &[ServerKind::Redis],
    source: include_str!("pub_sub.rs"),
    story_zh: "售罄和补货都通过发布订阅广播，各节点据此设置或清除标记；标记会过期，丢一条消息最多影响一个过期时间。\n\
        问题：漏收消息的节点在过期之前仍会误拒。\n\
        下一步：Stampede 的 shielded 给状态编号，旧消息盖不过新状态。",
    run: |lab, version| Box::pin(sell_out_and_top_up::<PubSub>(lab, version)),
};

const ADMIT: &str = r"
    if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 2 end
    if tonumber(redis.call('GET', KEYS[1])) < 1 then return 1 end
    redis.call('DECR', KEYS[1])
    redis.call('SADD', KEYS[2], ARGV[1])
    return 0";

const CHANNEL: &str = "sale";

struct PubSub {
    redis: CountedRedis,
    sold_out_until: Arc<Mutex<Option<Instant>>>,
    /// Ends with this value.
    _listener: JoinSet<()>,
}

impl Shop for PubSub {
    async fn open(site: &Site) -> Result<Self> {
        let mut redis = site.redis()?;
        let _: bool = redis.set_nx("stock", site.stock).await?;
        let mut subscription = site.redis_client()?.get_async_pubsub().await?;
        subscription.subscribe(CHANNEL).await?;
        let sold_out_until = Arc::new(Mutex::new(None));
        let (mut listener, mark) = (JoinSet::new(), sold_out_until.clone());
        listener.spawn(async move {
            let mut messages = subscription.into_on_message();
            while let Some(message) = messages.next().await {
                let sold_out = message.get_payload_bytes() == b"soldout";
                *mark.lock() = sold_out.then(|| Instant::now() + EXPIRY);
            }
        });
        Ok(Self { redis, sold_out_until, _listener: listener })
    }

    async fn buy(&self, user: u64) -> Result<Answer> {
        if self.sold_out_until.lock().is_some_and(|until| until > Instant::now()) {
            return Ok(Answer::SoldOut);
        }
        let admit = Script::new(ADMIT);
        let admitted: u8 = admit.key("stock").key("buyers").arg(user).invoke_async(&mut self.redis.clone()).await?;
        match admitted {
            0 => Ok(Answer::Bought),
            1 => {
                *self.sold_out_until.lock() = Some(Instant::now() + EXPIRY);
                let _: u64 = self.redis.clone().publish(CHANNEL, "soldout").await?;
                Ok(Answer::SoldOut)
            }
            _ => Ok(Answer::AlreadyBought),
        }
    }
}

impl SoldOutShop for PubSub {
    async fn top_up(&self, stock: u64) -> Result<()> {
        let mut redis = self.redis.clone();
        let _: u64 = redis.incr("stock", stock).await?;
        let _: u64 = redis.publish(CHANNEL, "reset").await?;
        Ok(())
    }
}
