//! What the lab knows of a version.

use std::pin::Pin;

use serde::Serialize;

use crate::error::Result;
use crate::measured::{Flaw, Measured};
use crate::run::Lab;
use crate::servers::ServerKind;

/// A run of a version.
pub type Running<'a> = Pin<Box<dyn Future<Output = Result<Measured>> + Send + 'a>>;

/// Versions that solve the same problem, from the first to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    Stock,
    OnePerPerson,
    PreDeduction,
    Queues,
    Locks,
    SoldOut,
    Reads,
    Limits,
    Tiers,
}

impl Family {
    pub const ALL: &[Self] = &[
        Self::Stock,
        Self::OnePerPerson,
        Self::PreDeduction,
        Self::Queues,
        Self::Locks,
        Self::SoldOut,
        Self::Reads,
        Self::Limits,
        Self::Tiers,
    ];

    /// The first part of the names of its versions.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::OnePerPerson => "one-per-person",
            Self::PreDeduction => "pre-deduction",
            Self::Queues => "queues",
            Self::Locks => "locks",
            Self::SoldOut => "sold-out",
            Self::Reads => "reads",
            Self::Limits => "limits",
            Self::Tiers => "tiers",
        }
    }

    /// What the family is about, in English and Chinese.
    pub const fn title(self) -> (&'static str, &'static str) {
        match self {
            Self::Stock => ("Not selling more than there is", "库存不超卖"),
            Self::OnePerPerson => ("One order per person", "一人一单"),
            Self::PreDeduction => ("Deducting the stock in Redis", "Redis 预扣减"),
            Self::Queues => ("Answering first, writing later", "异步下单"),
            Self::Locks => ("Locks over several nodes", "分布式锁"),
            Self::SoldOut => ("Refusing in the process after the sell-out", "售罄缓存"),
            Self::Reads => ("Reading through a cache", "缓存读取"),
            Self::Limits => ("Limits, ids and sessions", "限流、ID 与会话"),
            Self::Tiers => ("The tiers of Stampede", "Stampede 的四种部署模式"),
        }
    }
}

/// What must come out of every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// This flaw shows.
    Flawed(Flaw),
    /// No flaw shows.
    Sound,
}

#[derive(Debug)]
pub struct Version {
    /// `family/version`, as `--only` takes it.
    pub name: &'static str,
    pub family: Family,
    pub expected: Expected,
    /// Why it comes out as it does, in one line.
    pub because: &'static str,
    pub needs: &'static [ServerKind],
    /// The file, which begins with the story in English.
    pub source: &'static str,
    /// The same story in Chinese.
    pub story_zh: &'static str,
    pub run: for<'a> fn(&'a Lab, &'static Version) -> Running<'a>,
}

impl Version {
    /// The story in English: the comment at the top of the file.
    pub fn story(&self) -> String {
        let comment = self.source.lines().map_while(|line| line.strip_prefix("//!"));
        comment.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect()
    }

    /// The first line of the story.
    pub fn title(&self) -> String {
        self.story().lines().next().unwrap_or_default().trim_end_matches('.').to_owned()
    }
}
