//! Ids from a leased worker number: 41 bits of milliseconds since 2022-01-01 UTC, 10 bits of worker, 12 bits of sequence.
//!
//! Why an id never repeats: a [`Lease`] grants one worker number for a range of milliseconds in the lessor's clock, no two
//! leases of a worker overlap, and a generator embeds only milliseconds inside its lease, in rising order. The node's own clock
//! only chooses *where* inside the range; when it goes back, the generator continues from its last millisecond.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::clock::{Clock, Timestamp};

const EPOCH_MS: i64 = 1_640_995_200_000; // 2022-01-01T00:00:00Z
const WORKER_BITS: u32 = 10;
const SEQUENCE_BITS: u32 = 12;
const LAST_SEQUENCE: i64 = (1 << SEQUENCE_BITS) - 1;

/// Worker numbers are below this.
pub const MAX_WORKERS: u16 = 1 << WORKER_BITS;

/// The number of an id generator, one of 1,024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u16);

/// The right to make ids as `worker` with milliseconds in `from..until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    pub worker: WorkerId,
    pub from: Timestamp,
    pub until: Timestamp,
}

/// The right to make ids has ended, or is used up: no id can be made until it is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease to make ids has ended; no id can be made until it is renewed")]
pub struct LeaseEnded;

/// Makes ids that are unique across nodes and rise on each.
pub trait IdGenerator: Send + Sync + fmt::Debug {
    /// A positive number that no generator has returned before, above all that this one has returned. Never waits.
    fn next(&self) -> Result<i64, LeaseEnded>;
}

#[derive(Debug)]
struct State {
    lease: Lease,
    ms: i64,
    sequence: i64,
}

#[derive(Debug)]
pub struct Snowflake {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

impl Snowflake {
    pub fn new(clock: Arc<dyn Clock>, lease: Lease) -> Self {
        let state = State { lease, ms: lease.from.ms() - 1, sequence: LAST_SEQUENCE };
        Self { clock, state: Mutex::new(state) }
    }

    /// Continues under a renewed or a new lease.
    pub fn grant(&self, lease: Lease) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if lease.from.ms() > state.ms {
            // Nothing below the lease, and nothing below what was made so far: ids keep rising.
            state.ms = lease.from.ms() - 1;
            state.sequence = LAST_SEQUENCE;
        } else if lease.worker != state.lease.worker {
            // The rest of this millisecond may not be used under the new number either.
            state.sequence = LAST_SEQUENCE;
        }
        state.lease = lease;
    }

    /// The time at which an id was made.
    pub const fn made_at(id: i64) -> Timestamp {
        Timestamp::from_ms((id >> (WORKER_BITS + SEQUENCE_BITS)) + EPOCH_MS)
    }

    /// The worker whose number an id carries.
    pub const fn worker_of(id: i64) -> WorkerId {
        // Ten bits fit.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "masked to ten bits")]
        WorkerId(((id >> SEQUENCE_BITS) & (MAX_WORKERS as i64 - 1)) as u16)
    }

    pub fn worker(&self) -> WorkerId {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).lease.worker
    }

    /// Whether the next id can be made.
    pub fn is_usable(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let next_ms = if state.sequence < LAST_SEQUENCE { state.ms } else { state.ms + 1 };
        next_ms < state.lease.until.ms()
    }

    /// The first millisecond that no id has used: a new lease must reach beyond it.
    pub fn unused_from(&self) -> Timestamp {
        Timestamp::from_ms(self.state.lock().unwrap_or_else(PoisonError::into_inner).ms + 1)
    }
}

impl IdGenerator for Snowflake {
    fn next(&self) -> Result<i64, LeaseEnded> {
        let now_ms = self.clock.now().ms();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that is beyond the lease, by itself or because a renewal is late, chooses nothing: go on from the last id.
        let (ms, sequence) = if now_ms > state.ms && now_ms < state.lease.until.ms() {
            (now_ms, 0)
        } else if state.sequence < LAST_SEQUENCE {
            (state.ms, state.sequence + 1)
        } else {
            (state.ms + 1, 0)
        };
        if ms >= state.lease.until.ms() {
            return Err(LeaseEnded);
        }
        state.ms = ms;
        state.sequence = sequence;
        let worker = i64::from(state.lease.worker.0);
        Ok(((ms - EPOCH_MS) << (WORKER_BITS + SEQUENCE_BITS)) | (worker << SEQUENCE_BITS) | sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const START_MS: i64 = EPOCH_MS + 1_000_000;

    fn lease(worker: u16, from_ms: i64, until_ms: i64) -> Lease {
        let (from, until) = (Timestamp::from_ms(from_ms), Timestamp::from_ms(until_ms));
        Lease { worker: WorkerId(worker), from, until }
    }

    #[test]
    fn threads_never_share_an_id() {
        let generator = Snowflake::new(Arc::new(crate::clock::SystemClock), lease(3, START_MS, i64::MAX));
        let batches: Vec<Vec<i64>> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| (0..20_000).map(|_| generator.next().unwrap()).collect())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let mut seen = HashSet::new();
        for batch in batches {
            assert!(batch.is_sorted_by(|a, b| a < b), "one thread's ids rise");
            assert!(batch.iter().all(|&id| id > 0 && seen.insert(id)));
        }
    }

    #[test]
    fn stays_inside_its_lease() {
        let clock = Arc::new(ManualClock::at(Timestamp::from_ms(START_MS)));
        let generator = Snowflake::new(clock.clone(), lease(1, START_MS, START_MS + 2));
        let ids: Vec<i64> = std::iter::from_fn(|| generator.next().ok()).collect();
        assert_eq!(ids.len(), 2 * 4096, "two milliseconds hold just so many");
        generator.grant(lease(1, START_MS, START_MS + 3));
        assert!(generator.next().unwrap() > ids[ids.len() - 1]);
        clock.set(Timestamp::from_ms(START_MS + 1_000_000));
        assert!(generator.next().unwrap() > ids[ids.len() - 1], "a clock far ahead does not stop it");
        assert!(generator.is_usable());
        let rest = std::iter::from_fn(|| generator.next().ok()).count();
        assert_eq!(rest, 4096 - 2, "and does not lead it out of its lease");
        assert_eq!(generator.next(), Err(LeaseEnded));
        assert!(!generator.is_usable());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Make(u16),
        ClockBy(i64),
        Restart,
        NewWorker,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..6000u16).prop_map(Step::Make),
            (-3_600_000..3_600_000i64).prop_map(Step::ClockBy),
            Just(Step::Restart),
            Just(Step::NewWorker),
        ];
        proptest::collection::vec(step, 1..40)
    }

    proptest! {
        /// Over restarts, new workers and a clock that jumps an hour either way: unique, and rising on one generator.
        #[test]
        fn never_repeats(steps in steps()) {
            const SPAN_MS: i64 = 60_000;
            let clock = Arc::new(ManualClock::at(Timestamp::from_ms(START_MS + 10_000_000)));
            let mut leased_until_ms = [0i64; 64]; // the lessor's book
            let mut lessor = |worker: u16, not_before: i64, now: i64| {
                let from = leased_until_ms[usize::from(worker)].max(now).max(not_before);
                leased_until_ms[usize::from(worker)] = from + SPAN_MS;
                lease(worker, from, from + SPAN_MS)
            };
            let mut worker = 0;
            let mut generator = Snowflake::new(clock.clone(), lessor(worker, 0, clock.now().ms()));
            let (mut seen, mut last) = (HashSet::new(), 0);
            for step in steps {
                match step {
                    Step::Make(n) => for _ in 0..n {
                        let id = match generator.next() {
                            Ok(id) => id,
                            Err(LeaseEnded) => {
                                worker = (worker + 1) % 64;
                                generator.grant(lessor(worker, generator.unused_from().ms(), clock.now().ms()));
                                match generator.next() { Ok(id) => id, Err(LeaseEnded) => break }
                            }
                        };
                        prop_assert!(id > last, "ids rise: {id} after {last}");
                        prop_assert!(seen.insert(id));
                        last = id;
                    },
                    Step::ClockBy(ms) => clock.set(Timestamp::from_ms((clock.now().ms() + ms).max(START_MS))),
                    Step::Restart => {
                        generator = Snowflake::new(clock.clone(), lessor(worker, 0, clock.now().ms()));
                        last = 0;
                    }
                    Step::NewWorker => {
                        worker = (worker + 1) % 64;
                        generator.grant(lessor(worker, generator.unused_from().ms(), clock.now().ms()));
                    }
                }
            }
        }
    }
}
