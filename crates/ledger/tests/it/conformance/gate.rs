//! The record of a gate on a server.

use std::time::Duration;

use stampede_core::ids::WorkerId;
use stampede_core::ports::{ClaimOutcome, LoadedSale, ParkedMessage, QueueClaim, QueueSettings, RecordOutcome, Stores};
use stampede_core::{Epoch, RejectReason, SaleId, SalePhase, Timestamp};

use super::{E1, NOW, batch, order, refused, sale_of, user};

pub async fn one_rebuild_wins_and_opens_every_sale(stores: &Stores) {
    let (ledger, sale) = (&stores.ledger, sale_of(stores, 5).await);
    let phase = async || ledger.sale(sale).await.unwrap().unwrap().phase;
    assert_eq!(phase().await, SalePhase::Loading, "a new sale is not open yet");
    let record = ledger.gate_record("one").await.unwrap();
    assert_eq!(record.ledger_id, "one");
    assert_eq!(ledger.gate_record("two").await.unwrap(), record, "the id never changes");
    let from = record.incarnation;
    assert!(!ledger.finish_load(sale, Epoch(2), from).await.unwrap(), "another epoch");
    assert!(!ledger.finish_load(sale, E1, from + 1).await.unwrap(), "another incarnation");
    assert!(ledger.finish_load(sale, E1, from).await.unwrap());
    assert!(!ledger.finish_load(sale, E1, from).await.unwrap(), "it is open");
    assert_eq!(phase().await, SalePhase::Open);
    ledger.record(sale, E1, &batch(&[(1, 11), (2, 12)])).await.unwrap();
    ledger.cancel(order(2), user(12), NOW).await.unwrap();

    // Of concurrent rebuilds one wins.
    let begin = |ledger: std::sync::Arc<dyn stampede_core::ports::Ledger>| async move {
        ledger.begin_rebuild(from, "r1").await.unwrap()
    };
    let (one, other) = tokio::join!(begin(ledger.clone()), begin(ledger.clone()));
    assert_eq!(one.xor(other), Some(from + 1));
    let replication_id = async || ledger.gate_record("").await.unwrap().replication_id;
    assert_eq!(replication_id().await, "r1");
    assert_eq!(ledger.begin_rebuild(from, "late").await.unwrap(), None);
    assert_eq!(replication_id().await, "r1", "that of the rebuild that has won");
    assert_eq!(phase().await, SalePhase::Closing);
    assert_eq!(ledger.begin_load(sale, E1, from).await.unwrap(), None, "the older incarnation cannot load");
    assert!(!ledger.finish_load(sale, E1, from + 1).await.unwrap(), "it is closing");

    let LoadedSale { sale: loaded, marks, .. } = ledger.begin_load(sale, E1, from + 1).await.unwrap().unwrap();
    assert_eq!((loaded.epoch, loaded.phase, loaded.sold), (Epoch(2), SalePhase::Loading, 1));
    assert_eq!(marks, [(user(11), order(1))]);
    assert_eq!(ledger.sale(sale).await.unwrap().unwrap(), loaded);
    let again = ledger.begin_load(sale, E1, from + 1).await.unwrap();
    assert_eq!(again, None, "another node has begun to load the sale that was closed under this epoch");
    assert_eq!(ledger.sale(sale).await.unwrap().unwrap(), loaded);
    let late = ledger.record(sale, E1, &batch(&[(3, 13)])).await.unwrap();
    assert_eq!(late, [refused(RejectReason::Epoch, None)], "a node that slept through the rebuild does no harm");

    // A second rebuild begins before the first has ended, on another server.
    assert_eq!(ledger.begin_rebuild(from + 1, "r2").await.unwrap(), Some(from + 2));
    assert!(!ledger.finish_load(sale, Epoch(2), from + 1).await.unwrap());
    assert_eq!(replication_id().await, "r2");
    assert_eq!(ledger.begin_load(sale, Epoch(2), from + 2).await.unwrap().unwrap().sale.epoch, Epoch(3));
    assert!(ledger.finish_load(sale, Epoch(3), from + 2).await.unwrap());
    assert_eq!(ledger.record(sale, Epoch(3), &batch(&[(4, 14)])).await.unwrap(), [RecordOutcome::Inserted]);

    assert_eq!(phase().await, SalePhase::Open);
}

pub async fn a_new_sale_is_opened_under_the_incarnation_of_a_rebuild(stores: &Stores) {
    let (ledger, sale) = (&stores.ledger, sale_of(stores, 5).await);
    let from = ledger.gate_record("id").await.unwrap().incarnation;
    let phase = async || ledger.sales(None).await.unwrap()[0].phase;
    assert_eq!(ledger.begin_rebuild(from, "r1").await.unwrap(), Some(from + 1));
    assert_eq!(phase().await, SalePhase::Loading, "it was never open");
    assert!(!ledger.finish_load(sale, E1, from).await.unwrap());
    assert!(ledger.finish_load(sale, E1, from + 1).await.unwrap());
    assert_eq!(phase().await, SalePhase::Open);
    assert_eq!(ledger.begin_rebuild(from + 1, "r2").await.unwrap(), Some(from + 2));
    assert_eq!(phase().await, SalePhase::Closing);
    assert_eq!(ledger.load(sale).await.unwrap().unwrap().sale.phase, SalePhase::Closing);
}

pub async fn tiers_exclude_each_other(stores: &Stores) {
    const SPAN: Duration = Duration::from_secs(60);
    let ledger = &stores.ledger;
    let lease = async |holder| ledger.lease_worker(holder, None, Timestamp::from_ms(0), SPAN).await.unwrap();
    let incarnation = async || ledger.gate_record("id").await.unwrap().incarnation;
    let first = incarnation().await;
    assert_eq!(ledger.begin_rebuild(first, "r").await.unwrap(), Some(first + 1));
    let first = first + 1;
    let a = lease("a").await;
    assert_eq!(ledger.claim_tier("a", "shared", &[]).await.unwrap(), ClaimOutcome::Claimed);
    assert_eq!(incarnation().await, first + 1, "another tier may have sold before");
    let b = lease("b").await;
    assert_eq!(ledger.claim_tier("b", "solo", &[]).await.unwrap(), ClaimOutcome::OtherTier("shared".into()));
    assert_eq!(ledger.claim_tier("b", "shared", &[]).await.unwrap(), ClaimOutcome::Claimed);
    assert_eq!(incarnation().await, first + 1, "the tier is the same");
    ledger.return_worker("a", a.worker, a.from).await.unwrap();
    lease("c").await;
    assert_eq!(
        ledger.claim_tier("c", "solo", &[]).await.unwrap(),
        ClaimOutcome::OtherTier("shared".into()),
        "b still runs"
    );
    ledger.return_worker("b", b.worker, b.from).await.unwrap();
    let incarnation_before = incarnation().await;
    let after_shared = ledger.claim_tier("c", "solo", &["queued", "shared"]).await.unwrap();
    assert_eq!(after_shared, ClaimOutcome::After("shared".into()));
    assert_eq!(incarnation().await, incarnation_before, "nothing was changed");
    assert_eq!(ledger.claim_tier("c", "shared", &["queued"]).await.unwrap(), ClaimOutcome::Claimed);
    assert_eq!(ledger.claim_tier("c", "solo", &["queued"]).await.unwrap(), ClaimOutcome::Claimed);
    assert_eq!(incarnation().await, first + 2);
    assert_eq!(ledger.gate_record("").await.unwrap().replication_id, "", "the gate is not open on any server");
}

/// A process that writes no events does not run beside one that does, which would lose events. `stores` and `writing` are one database.
pub async fn processes_agree_on_events(stores: &Stores, writing: &Stores) {
    let lease = async |holder: &str| {
        let span = Duration::from_secs(60);
        stores.ledger.lease_worker(holder, None, Timestamp::from_ms(0), span).await.unwrap()
    };
    let claim = async |stores: &Stores, holder: &str| stores.ledger.claim_tier(holder, "shared", &[]).await.unwrap();
    let a = lease("a").await;
    let b = lease("b").await;
    assert_eq!(claim(writing, "a").await, ClaimOutcome::Claimed);
    assert_eq!(claim(stores, "b").await, ClaimOutcome::OtherEvents);
    assert_eq!(claim(writing, "b").await, ClaimOutcome::Claimed);
    stores.ledger.return_worker("a", a.worker, a.from).await.unwrap();
    let c = lease("c").await;
    assert_eq!(claim(stores, "c").await, ClaimOutcome::OtherEvents, "b still runs");
    stores.ledger.return_worker("b", b.worker, b.from).await.unwrap();
    assert_eq!(claim(stores, "c").await, ClaimOutcome::Claimed);
    lease("d").await;
    assert_eq!(claim(writing, "d").await, ClaimOutcome::OtherEvents, "c runs without");
    assert_eq!(claim(stores, "d").await, ClaimOutcome::Claimed);
    stores.ledger.return_worker("c", c.worker, c.from).await.unwrap();
}

/// Processes that run together have the same settings of the queue; the number of partitions changes only with the queue.
pub async fn processes_agree_on_the_queue(stores: &Stores) {
    let ledger = &stores.ledger;
    let lease = async |holder: &str| {
        ledger.lease_worker(holder, None, Timestamp::from_ms(0), Duration::from_secs(60)).await.unwrap();
        ledger.claim_tier(holder, "queued", &[]).await.unwrap();
    };
    let settings = |kind: &str, partitions, accept_within_ms| QueueSettings {
        kind: kind.to_owned(),
        partitions,
        accept_within_ms,
    };
    let rabbitmq = settings("rabbitmq", 2, 2000);
    lease("one").await;
    let before = ledger.gate_record("").await.unwrap().incarnation;
    assert_eq!(ledger.claim_queue("one", &rabbitmq).await.unwrap(), QueueClaim::Claimed);
    assert_eq!(ledger.gate_record("").await.unwrap().incarnation, before, "there was no other queue");
    let longer = settings("rabbitmq", 2, 3000);
    assert_eq!(ledger.claim_queue("one", &longer).await.unwrap(), QueueClaim::Claimed, "no other process runs");
    lease("two").await;
    assert_eq!(ledger.claim_queue("two", &longer).await.unwrap(), QueueClaim::Claimed);
    assert_eq!(ledger.claim_queue("two", &rabbitmq).await.unwrap(), QueueClaim::InUse(longer.clone()));
    let stream = settings("redis-stream", 0, 3000);
    assert_eq!(ledger.claim_queue("two", &stream).await.unwrap(), QueueClaim::InUse(longer));

    // Markers: each partition once, and an older one changes nothing.
    let (first, second) = (before + 1, before + 2);
    assert_eq!(ledger.begin_rebuild(before, "r").await.unwrap(), Some(first));
    assert_eq!(ledger.passed_markers(first).await.unwrap(), 0);
    ledger.pass_marker(0, first).await.unwrap();
    ledger.pass_marker(0, first).await.unwrap();
    assert_eq!(ledger.passed_markers(first).await.unwrap(), 1);
    // One of a rebuild that has not begun would pass for those of all rebuilds before it.
    for not_begun in [second, u64::MAX >> 1] {
        ledger.pass_marker(1, not_begun).await.unwrap();
    }
    assert_eq!(ledger.passed_markers(first).await.unwrap(), 1);
    assert_eq!(ledger.begin_rebuild(first, "r").await.unwrap(), Some(second));
    ledger.pass_marker(1, second).await.unwrap();
    ledger.pass_marker(1, first).await.unwrap();
    assert_eq!((ledger.passed_markers(first).await.unwrap(), ledger.passed_markers(second).await.unwrap()), (2, 1));

    for holder in ["one", "two"] {
        for worker in 0..2 {
            ledger.return_worker(holder, WorkerId(worker), Timestamp::from_ms(0)).await.unwrap();
        }
    }
    let more = settings("rabbitmq", 4, 3000);
    assert_eq!(ledger.claim_queue("three", &more).await.unwrap(), QueueClaim::OtherPartitions(2));
    assert_eq!(ledger.claim_queue("three", &stream).await.unwrap(), QueueClaim::Claimed);
    assert_eq!(ledger.gate_record("").await.unwrap().incarnation, second + 1, "the gate is rebuilt");
    assert_eq!(ledger.claim_queue("three", &more).await.unwrap(), QueueClaim::Claimed);
    assert_eq!(ledger.passed_markers(1).await.unwrap(), 0, "new partitions");
}

/// Messages are kept once, up to the limit, until they are deleted. Their sale need not exist.
pub async fn parked_messages_are_kept_until_they_are_deleted(stores: &Stores) {
    let ledger = &stores.ledger;
    let message = |number: u8, sale: i64| ParkedMessage {
        id: [number; 32],
        sale: SaleId::new(sale).unwrap(),
        payload: vec![number, 0, 255],
    };
    let (one, two, other) = (message(1, 7), message(2, 7), message(3, 8));
    let (sale, other_sale) = (one.sale, other.sale);
    assert!(ledger.parked_sales().await.unwrap().is_empty());
    assert!(ledger.park(&[one.clone(), two.clone()], 3).await.unwrap());
    assert!(ledger.park(std::slice::from_ref(&one), 3).await.unwrap(), "again");
    assert!(!ledger.park(&[other.clone(), message(4, 8)], 3).await.unwrap(), "too many");
    assert!(ledger.park(std::slice::from_ref(&other), 3).await.unwrap());
    assert_eq!(ledger.parked_sales().await.unwrap(), [(sale, 2), (other_sale, 1)]);
    assert_eq!(ledger.parked(sale, None, 10).await.unwrap(), [one.clone(), two.clone()]);
    assert_eq!(ledger.parked(sale, None, 1).await.unwrap(), std::slice::from_ref(&one));
    assert_eq!(ledger.parked(sale, Some(one.id), 10).await.unwrap(), std::slice::from_ref(&two));
    assert_eq!(ledger.parked(sale, Some(two.id), 10).await.unwrap(), []);
    ledger.unpark(std::slice::from_ref(&one)).await.unwrap();
    ledger.unpark(&[one, other]).await.unwrap();
    assert_eq!(ledger.parked_sales().await.unwrap(), [(sale, 1)]);
    ledger.unpark(&[two]).await.unwrap();
}
