//! What a node knows about one sale: the highest generation it has heard of, why the gate refuses users without an order, and who has
//! one.

use std::time::{Duration, Instant};

use stampede_core::{Epoch, Refusal, UserId};

use super::buyers::Buyers;

/// A sale that is sold out stays so while its generation is the same, and its window is the same. Compared by epoch first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tier) struct Generation {
    pub(in crate::tier) epoch: Epoch,
    pub(in crate::tier) number: u64,
}

/// The gate refuses users without an order.
#[derive(Debug, Clone, Copy)]
struct Refusing {
    refusal: Refusal,
    generation: Generation,
    until: Instant,
}

/// Who had an order while the gate refused all others for this reason. No order is added while it does: buyers of a sale that has not
/// started must not be taken for those of the same sale when it is sold out.
#[derive(Debug)]
struct KnownBuyers {
    refusal: Refusal,
    generation: Generation,
    /// How many marks the gate had when it was asked before the buyers were read.
    marks: u32,
    buyers: Buyers,
}

/// The pauses between calls of the gate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pauses {
    /// How long before its expiry an answer is renewed.
    pub(super) renewal: Duration,
    /// The shortest time between two questions.
    pub(super) question: Duration,
    /// The shortest time between two readings of the buyers.
    pub(super) reading: Duration,
}

/// The share of the time for which a node reads the buyers of a sale: at most about one in this many.
const READING_SHARE: u32 = 10;
/// The longest time between two readings.
const MAX_READING_PAUSE: Duration = Duration::from_secs(30);

impl Pauses {
    /// The pause after a reading that took this long. With many buyers whose orders are returned and sold again all the time, each node
    /// would otherwise read without a break.
    fn after_reading(self, took: Duration) -> Duration {
        took.saturating_mul(READING_SHARE).min(MAX_READING_PAUSE).max(self.reading)
    }
}

#[derive(Debug, Default)]
pub(super) struct SaleState {
    highest: Option<Generation>,
    refusing: Option<Refusing>,
    known: Option<KnownBuyers>,
    is_asking: bool,
    is_reading: bool,
    asked_at: Option<Instant>,
    /// When the last reading of the buyers ended, and how long it took.
    last_reading: Option<(Instant, Duration)>,
}

impl SaleState {
    /// Why the user may be refused: the gate has said so not long ago, and the user is none of its buyers.
    pub(super) fn refusal(&self, user: UserId, now: Instant) -> Option<Refusal> {
        let (Some(refusing), Some(known)) = (&self.refusing, &self.known) else { return None };
        let applies =
            now < refusing.until && known.generation == refusing.generation && known.refusal == refusing.refusal;
        (applies && !known.buyers.may_contain(user)).then_some(refusing.refusal)
    }

    /// A higher generation ends what is known; a lower one is an old message.
    pub(super) fn note(&mut self, generation: Generation) {
        if self.highest.is_none_or(|highest| highest < generation) {
            self.highest = Some(generation);
            self.refusing = None;
            self.known = None;
        }
    }

    pub(super) fn set_refusing(&mut self, generation: Generation, refusal: Refusal, until: Instant) {
        if self.highest.is_some_and(|highest| highest > generation) {
            return;
        }
        let same = self.refusing.filter(|known| (known.generation, known.refusal) == (generation, refusal));
        let until = same.map_or(until, |known| known.until.max(until));
        self.refusing = Some(Refusing { refusal, generation, until });
    }

    pub(super) fn set_buyers(&mut self, generation: Generation, refusal: Refusal, marks: u32, buyers: Buyers) {
        if self.highest == Some(generation) {
            self.known = Some(KnownBuyers { refusal, generation, marks, buyers });
        }
    }

    /// The gate has this many marks, and refuses for this reason. If there were others when the buyers were read, an order was admitted in
    /// between: the clock of Redis was set back, so that the sale was on once more. The buyers are read again then.
    pub(super) fn note_marks(&mut self, generation: Generation, refusal: Refusal, marks: u32) {
        if self.has_buyers_of(generation, refusal) && self.known.as_ref().is_some_and(|known| known.marks != marks) {
            self.known = None;
        }
    }

    /// Whether it is known who has an order in this generation while the gate refuses all others for this reason.
    pub(super) fn has_buyers_of(&self, generation: Generation, refusal: Refusal) -> bool {
        self.known.as_ref().is_some_and(|known| (known.generation, known.refusal) == (generation, refusal))
    }

    /// Forgets buyers who are not needed now, to make room for others: the next refusal of the gate makes the node read them again.
    pub(super) fn forget_unused_buyers(&mut self, now: Instant) {
        let is_used = self
            .refusing
            .is_some_and(|refusing| now < refusing.until && self.has_buyers_of(refusing.generation, refusing.refusal));
        if !is_used {
            self.known = None;
        }
    }

    /// What the gate has said may be out of date.
    pub(super) fn clear(&mut self) {
        self.refusing = None;
    }

    /// Whether the gate should be asked now, because there is no answer that can be used.
    pub(super) fn begin_asking(&mut self, now: Instant, pauses: Pauses) -> bool {
        let is_due = self.refusing.is_none_or(|refusing| refusing.until <= now);
        self.begin_if(is_due, now, pauses)
    }

    /// Whether the gate should be asked again now, because its answer is about to expire.
    pub(super) fn begin_renewal(&mut self, now: Instant, pauses: Pauses) -> bool {
        let is_due = self.refusing.is_some_and(|known| now < known.until && known.until - now < pauses.renewal);
        self.begin_if(is_due, now, pauses)
    }

    fn begin_if(&mut self, is_due: bool, now: Instant, pauses: Pauses) -> bool {
        // Near the edges of the window there may be no answer that can be used, however often the gate is asked.
        let begins = is_due && !self.is_asking && remaining_pause(self.asked_at, pauses.question, now).is_zero();
        if begins {
            (self.is_asking, self.asked_at) = (true, Some(now));
        }
        begins
    }

    pub(super) fn end_asking(&mut self) {
        self.is_asking = false;
    }

    /// Begins to ask for and read the buyers, after the returned pause. `None` if that is under way.
    pub(super) fn begin_reading(&mut self, now: Instant, pauses: Pauses) -> Option<Duration> {
        if self.is_reading {
            return None;
        }
        let reading_pause = self.last_reading.map_or(pauses.reading, |(_, took)| pauses.after_reading(took));
        let pause = remaining_pause(self.last_reading.map(|(ended_at, _)| ended_at), reading_pause, now);
        let pause = pause.max(remaining_pause(self.asked_at, pauses.question, now));
        (self.is_reading, self.asked_at) = (true, Some(now + pause));
        Some(pause)
    }

    /// The buyers were read, successfully or not.
    pub(super) fn note_reading(&mut self, ended_at: Instant, took: Duration) {
        self.last_reading = Some((ended_at, took));
    }

    pub(super) fn end_reading(&mut self) {
        self.is_reading = false;
    }
}

/// What is left of a pause that began at `since`.
fn remaining_pause(since: Option<Instant>, pause: Duration, now: Instant) -> Duration {
    since.map_or(Duration::ZERO, |since| (since + pause).saturating_duration_since(now))
}

#[cfg(test)]
mod tests {
    use super::super::buyers::Capacity;
    use super::*;

    const EXPIRY: Duration = Duration::from_secs(1);
    const PAUSES: Pauses = Pauses {
        renewal: Duration::from_millis(200),
        question: Duration::from_millis(100),
        reading: Duration::from_secs(1),
    };

    fn user(n: i64) -> UserId {
        UserId::new(n).unwrap()
    }

    const fn generation(epoch: i64, number: u64) -> Generation {
        Generation { epoch: Epoch(epoch), number }
    }

    fn buyers(users: &[i64]) -> Buyers {
        let mut buyers = Buyers::with_capacity(Capacity::new(10).reserve(10).unwrap());
        buyers.extend(users.iter().map(|&n| user(n)).collect());
        buyers
    }

    /// Sold out in generation 3 of epoch 1, to user 7.
    fn sold_out(now: Instant) -> SaleState {
        let mut state = SaleState::default();
        state.note(generation(1, 3));
        state.set_refusing(generation(1, 3), Refusal::SoldOut, now + EXPIRY);
        state.set_buyers(generation(1, 3), Refusal::SoldOut, 1, buyers(&[7]));
        state
    }

    fn is_sold_out(state: &SaleState, of: i64, now: Instant) -> bool {
        state.refusal(user(of), now) == Some(Refusal::SoldOut)
    }

    #[test]
    fn refuses_everyone_but_buyers_until_the_answer_expires() {
        let now = Instant::now();
        let state = sold_out(now);
        assert!(is_sold_out(&state, 8, now));
        assert_eq!(state.refusal(user(7), now), None, "an owner goes to the gate");
        assert_eq!(state.refusal(user(8), now + EXPIRY), None);
    }

    #[test]
    fn needs_both_the_answer_of_the_gate_and_the_buyers_of_the_same_generation() {
        let now = Instant::now();
        let mut state = SaleState::default();
        state.note(generation(1, 3));
        state.set_buyers(generation(1, 3), Refusal::SoldOut, 0, buyers(&[]));
        assert!(!is_sold_out(&state, 8, now), "a message alone does not count");
        state.set_refusing(generation(1, 3), Refusal::SoldOut, now + EXPIRY);
        assert!(is_sold_out(&state, 8, now));
        state.note(generation(1, 4));
        state.set_refusing(generation(1, 4), Refusal::SoldOut, now + EXPIRY);
        assert!(!is_sold_out(&state, 8, now), "the buyers may be others");
        assert!(!state.has_buyers_of(generation(1, 4), Refusal::SoldOut));
        state.set_buyers(generation(1, 3), Refusal::SoldOut, 0, buyers(&[]));
        assert!(!is_sold_out(&state, 8, now), "these were read before");
        state.set_buyers(generation(1, 4), Refusal::SoldOut, 0, buyers(&[]));
        assert!(is_sold_out(&state, 8, now));
    }

    #[test]
    fn buyers_of_a_sale_that_has_not_started_are_not_those_of_the_sale_when_it_is_sold_out() {
        let now = Instant::now();
        let mut state = SaleState::default();
        state.note(generation(1, 0));
        state.set_refusing(generation(1, 0), Refusal::NotStarted, now + EXPIRY);
        state.set_buyers(generation(1, 0), Refusal::NotStarted, 0, buyers(&[]));
        assert_eq!(state.refusal(user(7), now), Some(Refusal::NotStarted));
        // It starts and is sold to user 7, without a new generation.
        state.set_refusing(generation(1, 0), Refusal::SoldOut, now + EXPIRY);
        assert_eq!(state.refusal(user(7), now), None);
        assert!(!state.has_buyers_of(generation(1, 0), Refusal::SoldOut), "they are read again");
    }

    #[test]
    fn buyers_are_read_again_if_the_gate_has_other_marks() {
        let now = Instant::now();
        let mut state = SaleState::default();
        state.note(generation(1, 3));
        state.set_refusing(generation(1, 3), Refusal::Ended, now + EXPIRY);
        state.set_buyers(generation(1, 3), Refusal::Ended, 1, buyers(&[7]));
        state.note_marks(generation(1, 3), Refusal::Ended, 1);
        // An answer for another reason, or of an earlier generation, says nothing about these buyers.
        state.note_marks(generation(1, 3), Refusal::SoldOut, 2);
        state.note_marks(generation(1, 2), Refusal::Ended, 2);
        assert_eq!(state.refusal(user(8), now), Some(Refusal::Ended));
        // The clock of Redis was set back, and user 8 bought, without a new generation.
        state.note_marks(generation(1, 3), Refusal::Ended, 2);
        assert_eq!(state.refusal(user(8), now), None);
        assert!(!state.has_buyers_of(generation(1, 3), Refusal::Ended), "they are read again");
    }

    #[test]
    fn only_unused_buyers_are_forgotten() {
        let now = Instant::now();
        let mut state = sold_out(now);
        state.forget_unused_buyers(now);
        assert!(is_sold_out(&state, 8, now));
        state.forget_unused_buyers(now + EXPIRY);
        assert!(!state.has_buyers_of(generation(1, 3), Refusal::SoldOut));
    }

    #[test]
    fn higher_generation_re_opens_and_late_messages_change_nothing() {
        let now = Instant::now();
        let mut state = sold_out(now);
        state.note(generation(1, 2));
        assert!(is_sold_out(&state, 8, now), "an old message");
        state.note(generation(1, 4));
        assert!(!is_sold_out(&state, 8, now), "stock has been returned");
        state.set_refusing(generation(1, 3), Refusal::SoldOut, now + EXPIRY);
        assert!(!is_sold_out(&state, 8, now), "a late answer of the generation before");
        // A rebuild begins another epoch, whose generations begin again.
        let mut state = sold_out(now);
        state.note(generation(2, 0));
        assert!(!is_sold_out(&state, 8, now));
        state.set_refusing(generation(1, 9), Refusal::SoldOut, now + EXPIRY);
        assert!(!is_sold_out(&state, 8, now));
    }

    #[test]
    fn answer_is_renewed_once_shortly_before_it_expires() {
        let now = Instant::now();
        let mut state = sold_out(now);
        assert!(!state.begin_renewal(now, PAUSES));
        let late = now + EXPIRY - EXPIRY / 10;
        assert!(state.begin_renewal(late, PAUSES));
        assert!(!state.begin_renewal(late, PAUSES), "one at a time");
        state.set_refusing(generation(1, 3), Refusal::SoldOut, late + EXPIRY);
        state.end_asking();
        assert!(!state.begin_renewal(late, PAUSES));
        assert!(is_sold_out(&state, 8, now + EXPIRY));
    }

    #[test]
    fn long_readings_are_followed_by_long_pauses() {
        let ms = Duration::from_millis;
        for (took, pause) in [(1, 1000), (100, 1000), (101, 1010), (2000, 20_000), (3000, 30_000), (60_000, 30_000)] {
            let (mut state, ended_at) = (SaleState::default(), Instant::now());
            state.note_reading(ended_at, ms(took));
            assert_eq!(state.begin_reading(ended_at, PAUSES), Some(ms(pause)), "after {took} ms");
            state.end_reading();
            let later = ended_at + ms(pause) + PAUSES.question;
            assert_eq!(state.begin_reading(later, PAUSES), Some(Duration::ZERO), "after {took} ms");
        }
    }

    #[test]
    fn pauses_are_kept_if_no_answer_can_be_used() {
        let now = Instant::now();
        let mut state = SaleState::default();
        assert_eq!(state.begin_reading(now, PAUSES), Some(Duration::ZERO));
        assert_eq!(state.begin_reading(now, PAUSES), None, "one at a time");
        state.end_reading();
        assert_eq!(state.begin_reading(now, PAUSES), Some(PAUSES.question), "nothing was read");
        state.note_reading(now + PAUSES.question, Duration::ZERO);
        state.end_reading();
        assert_eq!(state.begin_reading(now + PAUSES.question, PAUSES), Some(PAUSES.reading));
        let mut state = sold_out(now);
        let expired = now + EXPIRY;
        assert!(state.begin_asking(expired, PAUSES));
        state.end_asking();
        assert!(!state.begin_asking(expired, PAUSES));
        assert!(state.begin_asking(expired + PAUSES.question, PAUSES));
    }
}
