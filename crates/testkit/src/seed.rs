//! Numbers that look random and can be thrown again: a failure prints its seed, and the seed replays it.

use std::ops::Range;

/// A small generator (splitmix64). Not for secrets.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn throw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in the range.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.throw() % (range.end - range.start)
    }
}
