//! The tier `shielded`.
//!
//! Adds: a node that knows that a sale is sold out refuses by itself, without a call of Redis.
//! Wrong: for as long as the expiry, a node that missed a message refuses although there is stock again.
//! Next: nothing: pick the simplest tier that is fast enough.

use super::measure;
use crate::servers::ServerKind;
use crate::{Expected, Family, Version};

pub const VERSION: Version = Version {
    name: "tiers/shielded",
    family: Family::Tiers,
    expected: Expected::Sound,
    because: "a sell-out has a number, and only a newer state of the sale ends it",
    needs: &[ServerKind::MariaDb, ServerKind::Redis],
    source: include_str!("shielded.rs"),
    story_zh: "节点知道已售罄就自己拒绝，不再访问 Redis。\n\
        代价：漏收消息的节点在过期之前可能误拒。\n\
        之后：没有下一版，选够用的最简单的那个。",
    run: |lab, _| Box::pin(measure(lab, "shielded")),
};
