//! The tier `solo`.
//!
//! Adds: the gate in the process decides, and orders are recorded in batches: one transaction for all who wait.
//! Wrong: one node sells; if it is down, nothing is sold.
//! Next: `shared`: several nodes with one gate in Redis.

use super::measure;
use crate::servers::ServerKind;
use crate::{Expected, Family, Version};

pub const VERSION: Version = Version {
    name: "tiers/solo",
    family: Family::Tiers,
    expected: Expected::Sound,
    because: "the gate decides, and every answer follows the commit of its batch",
    needs: &[ServerKind::MariaDb],
    source: include_str!("solo.rs"),
    story_zh: "进程内的闸门判定资格，订单成批写库：排队的人共用一个事务。\n\
        代价：只有一个节点在卖，它停了就卖不了。\n\
        下一版：shared，多个节点共用 Redis 里的闸门。",
    run: |lab, _| Box::pin(measure(lab, "solo")),
};
