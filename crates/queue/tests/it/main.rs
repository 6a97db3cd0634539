//! What every queue must do, on each queue there is, and what only RabbitMQ can do.
//!
//! RabbitMQ takes about ten seconds to start. So it is started once, and each test has queues of its own. A test that stops or blocks the
//! broker runs alone.

mod conformance;
mod rabbitmq;
mod support;

use stampede_queue::rabbitmq::QueueType;

use support::{Rabbit, exclusive, shared};

/// One test per function of the conformance suite, for one queue.
macro_rules! conformance {
    ($module:ident, $queue_type:expr) => {
        mod $module {
            use super::*;

            conformance!(@tests $queue_type, shared, batches_arrive_in_order_and_once, unacknowledged_deliveries_come_again,
                one_consumer_at_a_time_receives, prefetch_bounds_what_is_delivered, marker_stays_behind_the_batches_of_a_consumer_that_is_gone,
                marker_goes_through_every_partition, depth_counts_what_waits, undecodable_bytes_are_delivered_and_dead_lettered,
                installations_do_not_meet, concurrent_publishers_get_their_own_confirms, message_that_no_queue_takes_is_not_confirmed,
                waiting_for_a_delivery_can_be_cancelled, closed_queue_sends_nothing, sizes_are_bounded);
            conformance!(@tests $queue_type, exclusive, confirmed_messages_survive_a_crash_of_the_broker);
        }
    };
    (@tests $queue_type:expr, $access:ident, $($name:ident),*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let broker = $access().await;
            conformance::$name(&Rabbit { broker: &broker, queue_type: $queue_type }).await;
        })*
    };
}

conformance!(rabbitmq_classic, QueueType::Classic);
conformance!(rabbitmq_quorum, QueueType::Quorum);
