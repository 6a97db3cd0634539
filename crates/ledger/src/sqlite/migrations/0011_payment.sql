-- Payments that providers have reported.
--   * a transaction counts once                       payment PRIMARY KEY
--   * a payment is paid, returned, or to be returned  payment.status, written in the transaction that pays the order

CREATE TABLE payment (
    provider       TEXT NOT NULL,
    transaction_id TEXT NOT NULL,
    order_id       INTEGER NOT NULL, -- as reported: there may be no such order
    amount_cents   INTEGER NOT NULL,
    status         TEXT NOT NULL CHECK (status IN ('paid', 'refund_due', 'refunded')),
    reason         TEXT, -- why it must be returned
    received_at    INTEGER NOT NULL,
    PRIMARY KEY (provider, transaction_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX payment_by_order ON payment (order_id);

-- For the payments that must be returned.
CREATE INDEX payment_by_status ON payment (status, received_at);
