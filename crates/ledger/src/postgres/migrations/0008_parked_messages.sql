-- Messages of the queue whose orders cannot be recorded for now: they are kept here so that they hold up no other sale.
--   * no confirmed message is lost    a message is acknowledged after it is stored here, and deleted here after its orders are recorded
--   * no lock of the sale is needed   there is no foreign key: another client may hold the sale's row locked

CREATE TABLE parked_message (
    id      BYTEA PRIMARY KEY, -- a digest of the payload
    sale_id BIGINT NOT NULL,
    payload BYTEA NOT NULL
);

CREATE INDEX parked_message_by_sale ON parked_message (sale_id);
