//! What the server has granted, and the ids that are made of it.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::Mutex;
use stampede_core::ids::{LeaseEnded, counter};

/// Blocks that are held: those in use, those of a new series, and those of tomorrow. Beyond it the oldest is dropped.
const MAX_BLOCKS: usize = 8;

/// The counter of a day, and the name of its series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Series {
    pub(super) day: i64,
    pub(super) name: u64,
}

/// Numbers that no other node has, within their series.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    series: Series,
    last: u32,
    left: u32,
}

impl Block {
    /// The numbers up to `last`.
    pub(super) const fn new(series: Series, last: u32, count: u32) -> Self {
        Self { series, last, left: count }
    }
}

/// The right to use the numbers of a series with a second.
#[derive(Debug, Clone, Copy)]
struct Permit {
    series: Series,
    second: i64,
    until: Instant,
}

#[derive(Debug, Default)]
struct State {
    permit: Option<Permit>,
    blocks: VecDeque<Block>,
}

/// The blocks and the second of one node.
#[derive(Debug, Default)]
pub(super) struct Blocks(Mutex<State>);

impl Blocks {
    /// Keeps granted numbers for when a second of their series is granted.
    pub(super) fn add(&self, block: Block) {
        let mut state = self.0.lock();
        if block.left > 0 {
            state.blocks.push_back(block);
        }
        if state.blocks.len() > MAX_BLOCKS {
            state.blocks.pop_front();
        }
    }

    /// Uses this second from now on, with the numbers of its series. Those of other series of the day and of earlier days are dropped.
    pub(super) fn permit(&self, series: Series, second: i64, until: Instant) {
        let mut state = self.0.lock();
        state.permit = Some(Permit { series, second, until });
        state.blocks.retain(|block| block.series == series || block.series.day > series.day);
    }

    /// The highest second that was granted.
    pub(super) fn highest_second(&self) -> i64 {
        self.0.lock().permit.map_or(0, |permit| permit.second)
    }

    /// How many numbers of a series are left.
    pub(super) fn remaining(&self, series: Series) -> u32 {
        let state = self.0.lock();
        state.blocks.iter().filter(|block| block.series == series).map(|block| block.left).sum()
    }

    /// Whether an id can be made.
    pub(super) fn is_usable(&self, now: Instant) -> bool {
        let state = self.0.lock();
        let permit = state.permit.filter(|permit| now < permit.until);
        permit.is_some_and(|permit| state.blocks.iter().any(|block| block.series == permit.series && block.left > 0))
    }

    /// The next id, and how many numbers are left after it.
    pub(super) fn next(&self, now: Instant) -> Result<(i64, u32), LeaseEnded> {
        let mut state = self.0.lock();
        let State { permit, blocks } = &mut *state;
        let Some(Permit { series, second, .. }) = permit.filter(|permit| now < permit.until) else {
            return Err(LeaseEnded);
        };
        while blocks.front().is_some_and(|block| block.left == 0) {
            blocks.pop_front();
        }
        let mut usable = blocks.iter_mut().filter(|block| block.series == series && block.left > 0);
        let block = usable.next().ok_or(LeaseEnded)?;
        block.left -= 1;
        let id = counter::id(second, block.last - block.left);
        let left = block.left + usable.map(|block| block.left).sum::<u32>();
        Ok((id, left))
    }
}
