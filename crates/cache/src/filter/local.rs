//! In the process.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use fastbloom::AtomicBloomFilter;

use super::FALSE_POSITIVES;

#[derive(Debug)]
pub(crate) struct Local {
    capacity: usize,
    bits: RwLock<Bits>,
}

#[derive(Debug, Default)]
struct Bits {
    current: Option<AtomicBloomFilter>,
    filling: Option<AtomicBloomFilter>,
}

impl Local {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, bits: RwLock::default() }
    }

    fn read(&self) -> RwLockReadGuard<'_, Bits> {
        self.bits.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Bits> {
        self.bits.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn may_exist(&self, key: &str) -> Option<bool> {
        self.read().current.as_ref().map(|bits| bits.contains(key))
    }

    pub(crate) fn announce(&self, key: &str) {
        let bits = self.read();
        for bits in bits.current.iter().chain(&bits.filling) {
            bits.insert(key);
        }
    }

    pub(crate) fn begin(&self) {
        let fresh = AtomicBloomFilter::with_false_pos(FALSE_POSITIVES).expected_items(self.capacity.max(1));
        self.write().filling = Some(fresh);
    }

    pub(crate) fn add(&self, keys: &[String]) {
        if let Some(bits) = &self.read().filling {
            keys.iter().for_each(|key| _ = bits.insert(key.as_str()));
        }
    }

    pub(crate) fn finish(&self) {
        let mut bits = self.write();
        bits.current = bits.filling.take();
    }
}
