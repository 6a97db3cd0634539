-- The steps of orders after they were recorded.
--   * an order reaches a status once                  order_events PRIMARY KEY
--   * every step is in the history                    inserted in the transaction that changes orders.status
-- How an order was recorded is not repeated here: its row in orders shows it.

CREATE TABLE order_events (
    order_id    BIGINT NOT NULL,
    from_status VARCHAR(16) NOT NULL,
    to_status   VARCHAR(16) NOT NULL,
    at          BIGINT NOT NULL,
    reason      VARCHAR(16), -- NULL if it is not known
    actor       VARCHAR(16) NOT NULL,
    PRIMARY KEY (order_id, to_status)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Until now, only buyers could make an order take a step.
INSERT INTO order_events (order_id, from_status, to_status, at, reason, actor)
SELECT id, 'unpaid', 'cancelled', updated_at, 'requested', 'buyer' FROM orders WHERE status = 'cancelled';
