-- Until when orders must be paid.
--   * the search for what is due reads only that      payment_due PRIMARY KEY begins with due_at; one row per recorded batch
--   * an order expires only when it is due           orders.pay_by, the same as due_at of its batch

-- How long an order may be unpaid, in milliseconds; 0 without a limit. Sales that exist have none.
ALTER TABLE sale ADD COLUMN payment_deadline_ms INTEGER NOT NULL DEFAULT 0 CHECK (payment_deadline_ms >= 0);

-- NULL without a limit.
ALTER TABLE orders ADD COLUMN pay_by INTEGER;

-- The unpaid orders of one batch have an id in first_order to last_order, and this sale. Other orders may have ids between these.
CREATE TABLE payment_due (
    due_at      INTEGER NOT NULL,
    first_order INTEGER NOT NULL,
    last_order  INTEGER NOT NULL,
    sale_id     INTEGER NOT NULL,
    orders      INTEGER NOT NULL, -- how many there are in the batch
    PRIMARY KEY (due_at, first_order)
) STRICT, WITHOUT ROWID;

INSERT INTO fence (work, token) VALUES ('expire_orders', 0);
