//! What a node knows about one sale: the highest generation it has heard of, whether the gate has said that the sale is sold out, and who
//! has an order.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use fastbloom::BloomFilter;
use stampede_core::{Epoch, UserId};

/// Above this number of buyers a filter is used: a user that it takes for a buyer by mistake only goes to the gate.
const MAX_EXACT: usize = 100_000;
const FALSE_POSITIVES: f64 = 0.001;

/// A sale that is sold out stays so while its generation is the same. Compared by epoch first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tier) struct Generation {
    pub(in crate::tier) epoch: Epoch,
    pub(in crate::tier) number: u64,
}

/// The users who hold a mark, or more.
#[derive(Debug)]
pub(super) enum Buyers {
    Exact(HashSet<UserId>),
    Filter(Box<BloomFilter>),
}

impl Buyers {
    pub(super) fn with_capacity(count: usize) -> Self {
        if count <= MAX_EXACT {
            Self::Exact(HashSet::with_capacity(count))
        } else {
            Self::Filter(Box::new(BloomFilter::with_false_pos(FALSE_POSITIVES).expected_items(count)))
        }
    }

    pub(super) fn extend(&mut self, users: Vec<UserId>) {
        match self {
            Self::Exact(buyers) => buyers.extend(users),
            Self::Filter(filter) => {
                for user in users {
                    filter.insert(&user.get());
                }
            }
        }
    }

    fn may_contain(&self, user: UserId) -> bool {
        match self {
            Self::Exact(buyers) => buyers.contains(&user),
            Self::Filter(filter) => filter.contains(&user.get()),
        }
    }
}

/// The gate has said that the sale is sold out.
#[derive(Debug, Clone, Copy)]
struct SoldOut {
    generation: Generation,
    until: Instant,
}

#[derive(Debug, Default)]
pub(super) struct SaleState {
    highest: Option<Generation>,
    sold_out: Option<SoldOut>,
    buyers: Option<(Generation, Buyers)>,
    is_renewing: bool,
    is_reading: bool,
    read_at: Option<Instant>,
}

impl SaleState {
    /// Whether the user may be refused with `sold_out`: the gate has said so not long ago, and the user is none of its buyers.
    pub(super) fn is_sold_out(&self, user: UserId, now: Instant) -> bool {
        let (Some(sold_out), Some((of, buyers))) = (&self.sold_out, &self.buyers) else { return false };
        now < sold_out.until && *of == sold_out.generation && !buyers.may_contain(user)
    }

    /// A higher generation ends what is known; a lower one is an old message.
    pub(super) fn note(&mut self, generation: Generation) {
        if self.highest.is_none_or(|highest| highest < generation) {
            self.highest = Some(generation);
            self.clear();
        }
    }

    pub(super) fn set_sold_out(&mut self, generation: Generation, until: Instant) {
        if self.highest.is_some_and(|highest| highest > generation) {
            return;
        }
        let later =
            self.sold_out.filter(|known| known.generation == generation).map_or(until, |known| known.until.max(until));
        self.sold_out = Some(SoldOut { generation, until: later });
    }

    pub(super) fn set_buyers(&mut self, generation: Generation, buyers: Buyers) {
        if self.highest == Some(generation) {
            self.buyers = Some((generation, buyers));
        }
    }

    /// Whether it is known who has an order in this generation.
    pub(super) fn has_buyers_of(&self, generation: Generation) -> bool {
        self.buyers.as_ref().is_some_and(|(of, _)| *of == generation)
    }

    /// What is known may be out of date.
    pub(super) fn clear(&mut self) {
        self.sold_out = None;
    }

    /// Whether the gate should be asked now, because there is no answer that can be used.
    pub(super) fn begin_asking(&mut self, now: Instant) -> bool {
        let begins = !self.is_renewing && self.sold_out.is_none_or(|sold_out| sold_out.until <= now);
        self.is_renewing |= begins;
        begins
    }

    /// Whether the gate should be asked again now, because its answer is about to expire.
    pub(super) fn begin_renewal(&mut self, now: Instant, expiry: Duration) -> bool {
        let is_due = self.sold_out.is_some_and(|sold_out| now < sold_out.until && sold_out.until - now < expiry / 5);
        let begins = is_due && !self.is_renewing;
        self.is_renewing |= begins;
        begins
    }

    pub(super) fn end_renewal(&mut self) {
        self.is_renewing = false;
    }

    /// Begins to read the buyers, after the returned pause. `None` if that is under way.
    pub(super) fn begin_reading(&mut self, now: Instant, interval: Duration) -> Option<Duration> {
        if self.is_reading {
            return None;
        }
        let pause = self.read_at.map_or(Duration::ZERO, |at| (at + interval).saturating_duration_since(now));
        (self.is_reading, self.read_at) = (true, Some(now + pause));
        Some(pause)
    }

    pub(super) fn end_reading(&mut self) {
        self.is_reading = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPIRY: Duration = Duration::from_secs(1);

    fn user(n: i64) -> UserId {
        UserId::new(n).unwrap()
    }

    const fn generation(epoch: i64, number: u64) -> Generation {
        Generation { epoch: Epoch(epoch), number }
    }

    fn buyers(users: &[i64]) -> Buyers {
        let mut buyers = Buyers::with_capacity(users.len());
        buyers.extend(users.iter().map(|&n| user(n)).collect());
        buyers
    }

    /// Sold out in generation 3 of epoch 1, to user 7.
    fn sold_out(now: Instant) -> SaleState {
        let mut state = SaleState::default();
        state.note(generation(1, 3));
        state.set_sold_out(generation(1, 3), now + EXPIRY);
        state.set_buyers(generation(1, 3), buyers(&[7]));
        state
    }

    #[test]
    fn refuses_everyone_but_buyers_until_the_answer_expires() {
        let now = Instant::now();
        let state = sold_out(now);
        assert!(state.is_sold_out(user(8), now));
        assert!(!state.is_sold_out(user(7), now), "an owner goes to the gate");
        assert!(!state.is_sold_out(user(8), now + EXPIRY));
    }

    #[test]
    fn needs_both_the_answer_of_the_gate_and_the_buyers_of_the_same_generation() {
        let now = Instant::now();
        let mut state = SaleState::default();
        state.note(generation(1, 3));
        state.set_buyers(generation(1, 3), buyers(&[]));
        assert!(!state.is_sold_out(user(8), now), "a message alone does not count");
        state.set_sold_out(generation(1, 3), now + EXPIRY);
        assert!(state.is_sold_out(user(8), now));
        state.note(generation(1, 4));
        state.set_sold_out(generation(1, 4), now + EXPIRY);
        assert!(!state.is_sold_out(user(8), now), "the buyers may be others");
        assert!(!state.has_buyers_of(generation(1, 4)));
        state.set_buyers(generation(1, 3), buyers(&[]));
        assert!(!state.is_sold_out(user(8), now), "these were read before");
        state.set_buyers(generation(1, 4), buyers(&[]));
        assert!(state.is_sold_out(user(8), now));
    }

    #[test]
    fn higher_generation_re_opens_and_late_messages_change_nothing() {
        let now = Instant::now();
        let mut state = sold_out(now);
        state.note(generation(1, 2));
        assert!(state.is_sold_out(user(8), now), "an old message");
        state.note(generation(1, 4));
        assert!(!state.is_sold_out(user(8), now), "stock has been returned");
        state.set_sold_out(generation(1, 3), now + EXPIRY);
        assert!(!state.is_sold_out(user(8), now), "a late answer of the generation before");
        // A rebuild begins another epoch, whose generations begin again.
        let mut state = sold_out(now);
        state.note(generation(2, 0));
        assert!(!state.is_sold_out(user(8), now));
        state.set_sold_out(generation(1, 9), now + EXPIRY);
        assert!(!state.is_sold_out(user(8), now));
    }

    #[test]
    fn answer_is_renewed_once_shortly_before_it_expires() {
        let now = Instant::now();
        let mut state = sold_out(now);
        assert!(!state.begin_renewal(now, EXPIRY));
        let late = now + EXPIRY - EXPIRY / 10;
        assert!(state.begin_renewal(late, EXPIRY));
        assert!(!state.begin_renewal(late, EXPIRY), "one at a time");
        state.set_sold_out(generation(1, 3), late + EXPIRY);
        state.end_renewal();
        assert!(!state.begin_renewal(late, EXPIRY));
        assert!(state.is_sold_out(user(8), now + EXPIRY));
    }

    #[test]
    fn many_buyers_are_in_a_filter() {
        let count = MAX_EXACT + 1;
        let mut buyers = Buyers::with_capacity(count);
        buyers.extend((1..=count as i64).map(user).collect());
        assert!(matches!(buyers, Buyers::Filter(_)));
        assert!((1..=count as i64).all(|n| buyers.may_contain(user(n))));
        let mistaken = (1..=10_000).filter(|n| buyers.may_contain(user(10_000_000 + n))).count();
        assert!(mistaken < 100, "{mistaken} of 10000");
    }
}
