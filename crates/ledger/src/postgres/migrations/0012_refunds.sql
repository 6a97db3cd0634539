-- Returning payments, and redeeming paid orders.
--   * a payment is returned once, or an alert is raised    payment.refund_at, refund_tries
--   * a code is tried a few times only                     redeem_code.tries, counted before the code is compared

-- When the next attempt to return the payment is due; NULL if none is: it need not be returned, or an operator must do it.
ALTER TABLE payment ADD COLUMN refund_at BIGINT;
ALTER TABLE payment ADD COLUMN refund_tries BIGINT NOT NULL DEFAULT 0;
-- Why the last attempt failed.
ALTER TABLE payment ADD COLUMN refund_error TEXT;

UPDATE payment SET refund_at = received_at WHERE status = 'refund_due';

-- The codes with which paid orders are redeemed. An owner who asks gets one.
CREATE TABLE redeem_code (
    order_id BIGINT NOT NULL PRIMARY KEY,
    code     TEXT NOT NULL,
    tries    BIGINT NOT NULL DEFAULT 0
);
