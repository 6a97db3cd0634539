//! Who has an order, within a bound over all sales of a node.

use std::collections::HashSet;
use std::sync::Arc;

use fastbloom::BloomFilter;
use stampede_core::UserId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Above this number of buyers a filter is used: a user that it takes for a buyer by mistake only goes to the gate.
pub(super) const MAX_EXACT: usize = 100_000;
const FALSE_POSITIVES: f64 = 0.001;

/// How many buyers a node remembers, over all sales.
#[derive(Debug)]
pub(super) struct Capacity {
    max: u32,
    free: Arc<Semaphore>,
}

impl Capacity {
    pub(super) fn new(max: u32) -> Self {
        Self { max, free: Arc::new(Semaphore::new(max as usize)) }
    }

    /// Room for so many buyers, taken until it is dropped; `None` if there is not enough.
    pub(super) fn reserve(&self, count: u32) -> Option<OwnedSemaphorePermit> {
        self.free.clone().try_acquire_many_owned(count).ok()
    }

    pub(super) fn used(&self) -> u32 {
        self.max.saturating_sub(u32::try_from(self.free.available_permits()).unwrap_or(u32::MAX))
    }
}

/// The users who hold a mark, or more.
#[derive(Debug)]
pub(super) struct Buyers {
    users: Users,
    _reserved: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Users {
    Exact(HashSet<UserId>),
    Filter(Box<BloomFilter>),
}

impl Buyers {
    /// For as many buyers as there is room reserved.
    pub(super) fn with_capacity(reserved: OwnedSemaphorePermit) -> Self {
        let count = reserved.num_permits();
        let users = if count <= MAX_EXACT {
            Users::Exact(HashSet::with_capacity(count))
        } else {
            Users::Filter(Box::new(BloomFilter::with_false_pos(FALSE_POSITIVES).expected_items(count)))
        };
        Self { users, _reserved: reserved }
    }

    pub(super) fn extend(&mut self, users: Vec<UserId>) {
        match &mut self.users {
            Users::Exact(buyers) => buyers.extend(users),
            Users::Filter(filter) => {
                for user in users {
                    filter.insert(&user.get());
                }
            }
        }
    }

    pub(super) fn may_contain(&self, user: UserId) -> bool {
        match &self.users {
            Users::Exact(buyers) => buyers.contains(&user),
            Users::Filter(filter) => filter.contains(&user.get()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(n: i64) -> UserId {
        UserId::new(n).unwrap()
    }

    #[test]
    fn many_buyers_are_in_a_filter() {
        let count = MAX_EXACT + 1;
        let permits = u32::try_from(count).unwrap();
        let mut buyers = Buyers::with_capacity(Capacity::new(permits).reserve(permits).unwrap());
        buyers.extend((1..=count as i64).map(user).collect());
        assert!(matches!(buyers.users, Users::Filter(_)));
        assert!((1..=count as i64).all(|n| buyers.may_contain(user(n))));
        let mistaken = (1..=10_000).filter(|n| buyers.may_contain(user(10_000_000 + n))).count();
        assert!(mistaken < 100, "{mistaken} of 10000");
    }

    #[test]
    fn room_is_free_again_when_buyers_are_forgotten() {
        let capacity = Capacity::new(10);
        let buyers = Buyers::with_capacity(capacity.reserve(7).unwrap());
        assert!(capacity.reserve(4).is_none());
        assert_eq!(capacity.used(), 7);
        drop(buyers);
        assert_eq!(capacity.used(), 0);
        assert!(capacity.reserve(10).is_some());
    }
}
