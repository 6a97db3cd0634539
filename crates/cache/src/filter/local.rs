//! The filter of one process.

use fastbloom::AtomicBloomFilter;
use parking_lot::RwLock;

use super::FALSE_POSITIVE_RATE;

#[derive(Debug)]
pub(crate) struct LocalFilter {
    capacity: usize,
    bits: RwLock<Bits>,
}

#[derive(Debug, Default)]
struct Bits {
    current: Option<AtomicBloomFilter>,
    building: Option<AtomicBloomFilter>,
}

impl LocalFilter {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, bits: RwLock::default() }
    }

    /// `None` if there is no current filter.
    pub(crate) fn may_exist(&self, key: &str) -> Option<bool> {
        self.bits.read().current.as_ref().map(|bits| bits.contains(key))
    }

    pub(crate) fn announce(&self, key: &str) {
        let bits = self.bits.read();
        for bits in bits.current.iter().chain(&bits.building) {
            bits.insert(key);
        }
    }

    pub(crate) fn begin(&self) {
        let empty = AtomicBloomFilter::with_false_pos(FALSE_POSITIVE_RATE).expected_items(self.capacity.max(1));
        self.bits.write().building = Some(empty);
    }

    pub(crate) fn add(&self, keys: &[String]) {
        if let Some(bits) = &self.bits.read().building {
            keys.iter().for_each(|key| _ = bits.insert(key.as_str()));
        }
    }

    pub(crate) fn finish(&self) {
        let mut bits = self.bits.write();
        bits.current = bits.building.take();
    }
}
