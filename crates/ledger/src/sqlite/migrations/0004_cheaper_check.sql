-- The same table with the same promises. Its check said `status IN (…)`, for which SQLite builds a table of the four words at every insert.

CREATE TABLE orders_anew (
    id          INTEGER PRIMARY KEY,
    sale_id     INTEGER NOT NULL,
    user_id     INTEGER NOT NULL,
    live        INTEGER CHECK (live = 1),
    status      TEXT    NOT NULL,
    reason      TEXT,
    epoch       INTEGER NOT NULL,
    seq         INTEGER NOT NULL,
    price_cents INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    updated_at  INTEGER NOT NULL,
    UNIQUE (sale_id, user_id, live),
    CHECK ((live IS NOT NULL) = (status = 'unpaid' OR status = 'paid' OR status = 'redeemed' OR status = 'pending'))
) STRICT;

INSERT INTO orders_anew (id, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at)
SELECT id, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at FROM orders ORDER BY id;

DROP TABLE orders;

ALTER TABLE orders_anew RENAME TO orders;
