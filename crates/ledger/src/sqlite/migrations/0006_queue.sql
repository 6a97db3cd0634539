-- The queue between gate and ledger: what all processes must agree on, and how far rebuilds of the gate have drained it.
--   * one number of partitions, one time limit        gate.queue_* is compared at the start of every process
--   * a rebuild misses no confirmed message           queue_marker.incarnation is written after everything before the marker is recorded

ALTER TABLE gate ADD COLUMN queue_kind TEXT NOT NULL DEFAULT '';

-- Into how many partitions the queue is divided; 0 if it is not.
ALTER TABLE gate ADD COLUMN queue_partitions INTEGER NOT NULL DEFAULT 0;

-- How long after the beginning of its admission an order may be confirmed.
ALTER TABLE gate ADD COLUMN queue_accept_within_ms INTEGER NOT NULL DEFAULT 0;

CREATE TABLE queue_marker (
    queue_partition INTEGER PRIMARY KEY,
    incarnation     INTEGER NOT NULL -- of the last rebuild whose marker has come through; 0 if none has
) STRICT;
