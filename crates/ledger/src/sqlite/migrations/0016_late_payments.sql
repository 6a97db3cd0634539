-- Payments that arrive after their orders have ended: each is moved to a new order of the same buyer, or returned.
--   * a payment is moved or returned, never both        payment.held, cleared by whichever is first
--   * a repeated callback is recognized after a move    payment.reported_order

-- 1 while the payment may be moved. Its return is due at refund_at, once that time is over.
ALTER TABLE payment ADD COLUMN held INTEGER NOT NULL DEFAULT 0;

-- The order for which a payment was reported that was moved to order_id; NULL if it was not moved.
ALTER TABLE payment ADD COLUMN reported_order INTEGER;

-- Few payments are moved.
CREATE INDEX payment_by_reported_order ON payment (reported_order) WHERE reported_order IS NOT NULL;
