//! Users who have no order in a sale that has left the gate, as the ledger has said a moment ago. The ledger alone knows who has one, and
//! without this each request for such a sale would read it.
//!
//! Nobody can buy in such a sale any more. An order that is recorded so late, because an operator retries it, is found some seconds later.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use stampede_core::{SaleId, UserId};

/// An answer of the ledger is used for at least this time, and at most for twice as long.
const EXPIRY: Duration = Duration::from_secs(5);
/// The most answers within that time. Further ones replace the oldest.
const MAX_ANSWERS: usize = 50_000;

#[derive(Debug)]
pub(crate) struct WithoutOrder {
    answers: Mutex<Answers>,
}

/// Two sets instead of a time for each answer.
#[derive(Debug)]
struct Answers {
    newer: HashSet<(SaleId, UserId)>,
    older: HashSet<(SaleId, UserId)>,
    since: Instant,
}

impl WithoutOrder {
    pub(crate) fn new() -> Self {
        let (newer, older) = (HashSet::new(), HashSet::new());
        Self { answers: Mutex::new(Answers { newer, older, since: Instant::now() }) }
    }

    pub(crate) fn contains(&self, sale: SaleId, user: UserId) -> bool {
        let mut answers = self.answers.lock();
        answers.expire(Instant::now());
        answers.newer.contains(&(sale, user)) || answers.older.contains(&(sale, user))
    }

    pub(crate) fn insert(&self, sale: SaleId, user: UserId) {
        let mut answers = self.answers.lock();
        answers.expire(Instant::now());
        answers.newer.insert((sale, user));
    }
}

impl Answers {
    fn expire(&mut self, now: Instant) {
        let age = now.duration_since(self.since);
        if age >= EXPIRY || self.newer.len() >= MAX_ANSWERS {
            self.older = std::mem::take(&mut self.newer);
            self.since = now;
            if age >= 2 * EXPIRY {
                self.older.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(n: usize) -> (SaleId, UserId) {
        (SaleId::new(1).unwrap(), UserId::new(n as i64 + 1).unwrap())
    }

    #[test]
    fn answers_expire_and_are_bounded() {
        let without = WithoutOrder::new();
        let (sale, user) = pair(0);
        without.insert(sale, user);
        let mut answers = without.answers.lock();
        let start = answers.since;
        let known = |answers: &Answers| answers.newer.contains(&pair(0)) || answers.older.contains(&pair(0));
        answers.expire(start + EXPIRY);
        assert!(known(&answers));
        answers.expire(start + 2 * EXPIRY);
        assert!(!known(&answers));
        answers.newer.insert(pair(0));
        answers.expire(start + 5 * EXPIRY);
        assert!(!known(&answers), "nothing was asked for a while");
        drop(answers);
        for n in 0..3 * MAX_ANSWERS {
            let (sale, user) = pair(n);
            without.insert(sale, user);
        }
        let answers = without.answers.lock();
        assert!(answers.newer.len() <= MAX_ANSWERS && answers.older.len() <= MAX_ANSWERS);
    }
}
