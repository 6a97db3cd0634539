//! The tier `shared`.
//!
//! Adds: several nodes. One script call admits a whole batch, and its orders are in an outbox until the database has them.
//! Wrong: every buyer waits for the transaction.
//! Next: `queued`: the buyer is answered once the order is safe in the queue.

use super::measure;
use crate::servers::ServerKind;
use crate::{Expected, Family, Version};

pub const VERSION: Version = Version {
    name: "tiers/shared",
    family: Family::Tiers,
    expected: Expected::Sound,
    because: "the database has every order before its buyer is answered, and rejects what exceeds the stock",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("shared.rs"),
    story_zh: "多个节点，一次脚本调用放行一批；写库之前订单都在发件箱里，节点宕机由别的节点补录。\n\
        代价：每个买家都要等数据库事务。\n\
        下一版：queued，订单进了队列就应答。",
    run: |lab, _| Box::pin(measure(lab, "shared")),
};
