-- Reductions of stock beside top-ups, and the Redis on which the gate was opened.
--   * a change of stock is applied once               stock_change.request_id PRIMARY KEY
--   * total = stock at the creation + all added       added is written in the transaction that changes the total

ALTER TABLE top_up RENAME TO stock_change;

-- How many a reduction is to take away; 0 for a top-up.
ALTER TABLE stock_change ADD COLUMN reduce_by BIGINT NOT NULL DEFAULT 0;

-- When the total was reduced; 0 until then, and for a top-up.
ALTER TABLE stock_change ADD COLUMN completed_at BIGINT NOT NULL DEFAULT 0;

-- The replication id of the Redis on which the incarnation was opened; empty if it is not known.
ALTER TABLE gate ADD COLUMN replication_id TEXT NOT NULL DEFAULT '';
