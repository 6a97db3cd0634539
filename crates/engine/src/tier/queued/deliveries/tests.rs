use stampede_core::ports::Admitted;
use stampede_core::{Epoch, OrderId, Timestamp, UserId};
use stampede_queue::{DecodeError, Marker};

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
    let payload = Payload::Marker(Marker { incarnation: 7 });
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
    assert_eq!(deliveries.next_due(), Some(now + FIRST_PAUSE));
    let later = now + FIRST_PAUSE;
    let work = deliveries.take_work(later, MAX);
    assert_eq!(groups(&work), [(1, vec![1], false)]);
    assert!(report(&mut deliveries, work, 1, false, later).is_empty());
    assert_eq!(deliveries.next_due(), Some(later + 2 * FIRST_PAUSE), "the pauses grow");
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
