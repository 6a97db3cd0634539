-- What a receiver of the operator has not accepted yet. Written only if the setting events.webhook_url is set.
--   * every step is delivered at least once           inserted in the transaction that records or changes orders, deleted once accepted
--   * a step follows the steps before it              id rises; a rejected one is found by event_outbox UNIQUE (order_id, to_status)
-- An entry is a recorded batch (orders), or one step of one order (order_id and the columns after it).

CREATE TABLE event_outbox (
    id          BIGINT PRIMARY KEY AUTO_INCREMENT,
    sale_id     BIGINT NOT NULL,
    orders      MEDIUMTEXT, -- a JSON array of order ids
    order_id    BIGINT,
    from_status VARCHAR(16),
    to_status   VARCHAR(16),
    at          BIGINT,
    reason      VARCHAR(16), -- NULL if it is not known
    actor       VARCHAR(16),
    tries       BIGINT NOT NULL DEFAULT 0, -- how often it was rejected
    next_at     BIGINT NOT NULL DEFAULT 0, -- when it is due
    failed      BIGINT NOT NULL DEFAULT 0, -- 1: set aside until an operator retries it
    error       VARCHAR(1000), -- why it was rejected, or waits
    UNIQUE (order_id, to_status),
    CHECK ((orders IS NULL) <> (order_id IS NULL))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- For what is to be sent, and what is set aside.
CREATE INDEX event_outbox_by_state ON event_outbox (failed, id);

INSERT INTO fence (work, token) VALUES ('deliver_events', 0);
