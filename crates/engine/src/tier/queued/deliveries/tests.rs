use stampede_core::ports::Admitted;
use stampede_core::{Epoch, OrderId, Timestamp, UserId};
use stampede_queue::DecodeError;

use super::*;

const MAX: usize = 100;

fn sale(id: i64) -> SaleId {
    SaleId::new(id).unwrap()
}

fn batch(tag: u64, partition: u16, of: i64, orders: i64) -> Delivery {
    let admitted = |n: i64| Admitted {
        order: OrderId::new(i64::try_from(tag).unwrap() * 1000 + n + 1).unwrap(),
        user: UserId::new(n + 1).unwrap(),
        seq: n,
        at: Timestamp::from_ms(0),
    };
    let orders = (0..orders).map(admitted).collect();
    let payload = Payload::Batch(Batch { sale: sale(of), epoch: Epoch(1), orders });
    Delivery { tag: Tag(tag), partition, payload, redelivered: false }
}

fn marker(tag: u64, partition: u16) -> Delivery {
    let payload = Payload::Marker(Marker::Rebuild { incarnation: 7 });
    Delivery { tag: Tag(tag), partition, payload, redelivered: false }
}

fn marker_of_comparison(tag: u64, partition: u16) -> Delivery {
    let payload = Payload::Marker(Marker::Reconcile { id: 7 });
    Delivery { tag: Tag(tag), partition, payload, redelivered: false }
}

/// The groups to record: sale, tags, whether they go into quarantine; sorted by sale.
fn groups(work: &[Work]) -> Vec<(i64, Vec<u64>, bool)> {
    let mut groups: Vec<_> = work
        .iter()
        .filter_map(|work| match work {
            Work::Record { sale, batches, quarantine } => {
                Some((sale.get(), batches.iter().map(|held| held.tag.0).collect(), *quarantine))
            }
            _ => None,
        })
        .collect();
    groups.sort();
    groups
}

fn markers(work: &[Work]) -> Vec<u64> {
    work.iter().filter_map(|work| if let Work::Marker { tag, .. } = work { Some(tag.0) } else { None }).collect()
}

/// Reports one outcome for all batches of a sale.
fn report(deliveries: &mut Deliveries, work: Vec<Work>, of: i64, done: bool, now: Instant) -> Vec<u64> {
    for work in work {
        if let Work::Record { sale: found, batches, .. } = work
            && found == sale(of)
        {
            let batches = batches.into_iter().map(|held| (held, done)).collect();
            return deliveries.recorded(found, batches, now).into_iter().map(|tag| tag.0).collect();
        }
    }
    panic!("nothing of sale {of}");
}

#[test]
fn deliveries_of_a_sale_are_recorded_together_and_one_group_at_a_time() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    for delivery in [batch(1, 0, 1, 60), batch(2, 0, 2, 1), batch(3, 0, 1, 40), batch(4, 0, 1, 1)] {
        deliveries.add(delivery, now);
    }
    let work = deliveries.take_work(now, MAX);
    assert_eq!(groups(&work), [(1, vec![1, 3], false), (2, vec![2], false)]);
    assert!(deliveries.take_work(now, MAX).is_empty(), "both sales are busy");
    assert_eq!(report(&mut deliveries, work, 1, true, now), [1, 3]);
    assert_eq!(groups(&deliveries.take_work(now, MAX)), [(1, vec![4], false)]);
}

#[test]
fn marker_waits_for_everything_before_it_in_its_partition() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    for delivery in [batch(1, 0, 1, 1), batch(2, 1, 2, 1), marker(3, 0), batch(4, 0, 3, 1), marker(5, 2)] {
        deliveries.add(delivery, now);
    }
    let work = deliveries.take_work(now, MAX);
    assert_eq!(markers(&work), [5], "nothing is before it");
    assert_eq!(groups(&work), [(1, vec![1], true), (2, vec![2], false), (3, vec![4], false)]);
    assert_eq!(report(&mut deliveries, work, 1, true, now), [1]);
    assert_eq!(markers(&deliveries.take_work(now, MAX)), [3], "what comes after it does not matter");
    assert!(markers(&deliveries.take_work(now, MAX)).is_empty(), "it is reported once");
    assert_eq!(deliveries.finished(0, Tag(3)), Some(Tag(3)));
}

/// What is before it is not lost if it is recorded later, so it is tried as without a marker.
#[test]
fn marker_of_a_comparison_waits_and_quarantines_nothing() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    deliveries.add(batch(1, 0, 1, 1), now);
    let work = deliveries.take_work(now, MAX);
    assert!(report(&mut deliveries, work, 1, false, now).is_empty());
    deliveries.add(marker_of_comparison(2, 0), now);
    assert!(deliveries.take_work(now, MAX).is_empty(), "the pause is not over");
    assert_eq!(deliveries.next_due(now), Some(now + FIRST_PAUSE));
    let later = now + FIRST_PAUSE;
    let work = deliveries.take_work(later, MAX);
    assert_eq!((groups(&work), markers(&work)), (vec![(1, vec![1], false)], vec![]));
    assert_eq!(report(&mut deliveries, work, 1, true, later), [1]);
    assert_eq!(markers(&deliveries.take_work(later, MAX)), [2]);
    assert_eq!(deliveries.finished(0, Tag(2)), Some(Tag(2)));
    // A rebuild behind it: what is before both goes into quarantine.
    for delivery in [batch(3, 0, 1, 1), marker_of_comparison(4, 0), marker(5, 0)] {
        deliveries.add(delivery, later);
    }
    assert_eq!(groups(&deliveries.take_work(later, MAX)), [(1, vec![3], true)]);
}

#[test]
fn what_cannot_be_recorded_waits_and_holds_up_no_other() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    deliveries.add(batch(1, 0, 1, 1), now);
    let work = deliveries.take_work(now, MAX);
    assert!(report(&mut deliveries, work, 1, false, now).is_empty());
    deliveries.add(batch(2, 0, 1, 1), now);
    let work = deliveries.take_work(now, MAX);
    assert_eq!(groups(&work), [(1, vec![2], false)]);
    assert_eq!(report(&mut deliveries, work, 1, true, now), [2]);
    assert_eq!(deliveries.next_due(now), Some(now + FIRST_PAUSE));
    let later = now + FIRST_PAUSE;
    let work = deliveries.take_work(later, MAX);
    assert_eq!(groups(&work), [(1, vec![1], false)]);
    assert!(report(&mut deliveries, work, 1, false, later).is_empty());
    assert_eq!(deliveries.next_due(later), Some(later + 2 * FIRST_PAUSE), "the pauses grow");
    // A rebuild does not wait for the pause.
    deliveries.add(marker(3, 0), later);
    assert_eq!(groups(&deliveries.take_work(later, MAX)), [(1, vec![1], true)]);
}

#[test]
fn lost_connection_forgets_what_comes_again() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    for delivery in [batch(1, 0, 1, 1), marker(2, 0)] {
        deliveries.add(delivery, now);
    }
    let work = deliveries.take_work(now, MAX);
    deliveries.forget();
    deliveries.add(batch(3, 0, 1, 1), now);
    assert!(deliveries.take_work(now, MAX).is_empty(), "the sale is busy");
    assert!(report(&mut deliveries, work, 1, true, now).is_empty(), "an old delivery is not acknowledged");
    assert_eq!(groups(&deliveries.take_work(now, MAX)), [(1, vec![3], false)]);
}

#[test]
fn undecodable_message_is_a_dead_letter_before_a_marker_passes() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    let payload = Payload::Undecodable { bytes: vec![9], error: DecodeError::Version(9) };
    deliveries.add(Delivery { tag: Tag(1), partition: 0, payload, redelivered: false }, now);
    deliveries.add(marker(2, 0), now);
    let work = deliveries.take_work(now, MAX);
    assert!(matches!(&work[..], [Work::DeadLetter { tag: Tag(1), .. }]), "{work:?}");
    assert_eq!(deliveries.finished(0, Tag(1)), Some(Tag(1)));
    assert_eq!(markers(&deliveries.take_work(now, MAX)), [2]);
}

fn parks(work: &[Work]) -> Vec<(i64, Vec<u64>)> {
    let park = |work: &Work| match work {
        Work::Park { sale, held } => Some((sale.get(), held.iter().map(|held| held.tag.0).collect())),
        _ => None,
    };
    work.iter().filter_map(park).collect()
}

/// Reports one outcome for what is to be parked.
fn report_parked(deliveries: &mut Deliveries, work: &[Work], is_stored: bool, now: Instant) -> Vec<u64> {
    let Some(Work::Park { sale, held }) = work.iter().find(|work| matches!(work, Work::Park { .. })) else {
        panic!("nothing is to be parked: {work:?}");
    };
    deliveries.parked(*sale, held, is_stored, now).into_iter().map(|tag| tag.0).collect()
}

/// A sale whose first group is never recorded.
fn stuck() -> (Deliveries, Instant) {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    for delivery in [batch(1, 0, 1, 100), batch(2, 0, 1, 1), batch(3, 0, 2, 1), marker(4, 0)] {
        deliveries.add(delivery, now);
    }
    let work = deliveries.take_work(now, MAX);
    assert_eq!(report(&mut deliveries, work, 2, true, now), [3]);
    (deliveries, now)
}

#[test]
fn stuck_sale_is_parked_once_the_ledger_has_answered_for_a_while() {
    let (mut deliveries, now) = stuck();
    assert_eq!(deliveries.next_due(now), Some(now + STUCK_AFTER));
    assert!(deliveries.take_work(now + STUCK_AFTER / 2, MAX).is_empty());
    let now = now + STUCK_AFTER;
    assert_eq!(deliveries.take_work(now, MAX), [Work::Probe]);
    assert!(deliveries.take_work(now, MAX).is_empty() && deliveries.next_due(now).is_none(), "asked once");
    deliveries.probed(true, now);
    assert!(deliveries.take_work(now, MAX).is_empty());
    assert_eq!(deliveries.next_due(now), Some(now + ANSWERING_FOR));
    let now = now + ANSWERING_FOR;
    let work = deliveries.take_work(now, MAX);
    assert_eq!(parks(&work), [(1, vec![1, 2])]);
    assert!(deliveries.take_work(now, MAX).is_empty() && deliveries.next_due(now).is_none(), "parked once");
    assert_eq!(report_parked(&mut deliveries, &work, true, now), [1, 2]);
    assert_eq!(markers(&deliveries.take_work(now, MAX)), [4], "nothing is left before the marker");
    assert_eq!(deliveries.next_due(now), None);
    // What comes later does not wait.
    deliveries.add(batch(5, 0, 1, 1), now);
    assert_eq!(deliveries.next_due(now), Some(now));
    assert_eq!(parks(&deliveries.take_work(now, MAX)), [(1, vec![5])]);
}

#[test]
fn outage_of_the_ledger_parks_nothing() {
    let (mut deliveries, now) = stuck();
    let mut now = now + STUCK_AFTER;
    for _ in 0..10 {
        assert_eq!(deliveries.take_work(now, MAX), [Work::Probe]);
        deliveries.probed(false, now);
        assert_eq!(deliveries.next_due(now), Some(now + PROBE_PAUSE));
        now += PROBE_PAUSE;
    }
    // The ledger can be read again, and nothing can be written to it.
    assert_eq!(deliveries.take_work(now, MAX), [Work::Probe]);
    deliveries.probed(true, now);
    now += ANSWERING_FOR;
    let work = deliveries.take_work(now, MAX);
    assert!(report_parked(&mut deliveries, &work, false, now).is_empty());
    assert!(deliveries.take_work(now, MAX).is_empty());
    assert_eq!(deliveries.next_due(now), Some(now + PROBE_PAUSE));
    now += PROBE_PAUSE;
    assert_eq!(deliveries.take_work(now, MAX), [Work::Probe]);
}

#[test]
fn what_was_recorded_while_it_was_parked_is_acknowledged_once() {
    let (mut deliveries, start) = (Deliveries::default(), Instant::now());
    deliveries.add(batch(1, 0, 1, 1), start);
    let recording = deliveries.take_work(start, MAX);
    let now = start + STUCK_AFTER;
    deliveries.take_work(now, MAX);
    deliveries.probed(true, now);
    let now = now + ANSWERING_FOR;
    let parking = deliveries.take_work(now, MAX);
    assert_eq!(report(&mut deliveries, recording, 1, true, now), [1]);
    assert!(report_parked(&mut deliveries, &parking, true, now).is_empty());
    assert_eq!(deliveries.next_due(now), None);
}

/// The database rejects an order again and again, while others of its sale are recorded.
#[test]
fn delivery_that_fails_for_a_while_is_parked_alone() {
    let (mut deliveries, now) = (Deliveries::default(), Instant::now());
    deliveries.add(batch(1, 0, 1, 1), now);
    let work = deliveries.take_work(now, MAX);
    report(&mut deliveries, work, 1, false, now);
    let now = now + STUCK_AFTER;
    let work = deliveries.take_work(now, MAX);
    assert_eq!(groups(&work), [(1, vec![1], false)]);
    assert!(work.contains(&Work::Probe));
    deliveries.probed(true, now);
    report(&mut deliveries, work, 1, false, now);
    deliveries.add(batch(2, 0, 1, 1), now);
    let work = deliveries.take_work(now, MAX);
    assert_eq!(groups(&work), [(1, vec![2], false)]);
    report(&mut deliveries, work, 1, true, now);
    let now = now + ANSWERING_FOR;
    let work = deliveries.take_work(now, MAX);
    assert_eq!((groups(&work), parks(&work)), (vec![(1, vec![1], false)], vec![(1, vec![1])]), "tried meanwhile");
    assert_eq!(report_parked(&mut deliveries, &work, true, now), [1]);
    assert!(report(&mut deliveries, work, 1, false, now).is_empty());
    assert_eq!(deliveries.next_due(now), None);
}
