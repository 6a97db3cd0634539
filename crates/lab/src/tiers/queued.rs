//! The tier `queued`.
//!
//! Adds: the outbox is the queue. The buyer is answered with 202 at once, and consumers record the orders in batches.
//! Wrong: the order follows later, and its durability until then is that of Redis.
//! Next: `shielded`: refuse in the process after the sell-out.

use super::measure;
use crate::servers::ServerKind;
use crate::{Expected, Family, Version};

pub const VERSION: Version = Version {
    name: "tiers/queued",
    family: Family::Tiers,
    expected: Expected::Sound,
    because: "the admission and its message are one step, and recording is idempotent",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("queued.rs"),
    story_zh: "发件箱就是队列，立即应答 202，消费者成批写库。\n\
        代价：订单稍后才落库，在那之前的可靠性取决于 Redis。\n\
        下一版：shielded，售罄后在进程内拒绝。",
    run: |lab, _| Box::pin(measure(lab, "queued")),
};
