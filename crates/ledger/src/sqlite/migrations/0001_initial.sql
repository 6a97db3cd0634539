-- The invariants that these tables enforce, independent of the gate:
--   * an order id exists once                         orders.id PRIMARY KEY
--   * one live order per user and sale                UNIQUE (sale_id, user_id, live), live = 1 or NULL
--   * never more sold than the stock                  CHECK (sold <= total)
--   * one sale per voucher                            UNIQUE (voucher_id)
-- Times are in milliseconds since the Unix epoch, money is in cents.

CREATE TABLE shop_type (
    id   INTEGER PRIMARY KEY,
    name TEXT    NOT NULL,
    sort INTEGER NOT NULL
) STRICT;

INSERT INTO shop_type (id, name, sort) VALUES
    (1, '美食', 1), (2, 'KTV', 2), (3, '丽人', 3), (4, '健身', 4), (5, '休闲', 5);

CREATE TABLE shop (
    id      INTEGER PRIMARY KEY,
    type_id INTEGER NOT NULL REFERENCES shop_type (id),
    name    TEXT    NOT NULL,
    -- In lower case, for searches.
    folded_name TEXT NOT NULL,
    address TEXT    NOT NULL
) STRICT;

-- The n-grams of one, two and three characters of every shop's folded name, for searches for a part of a name.
CREATE TABLE shop_gram (
    gram    TEXT    NOT NULL,
    shop_id INTEGER NOT NULL,
    PRIMARY KEY (gram, shop_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE voucher (
    id          INTEGER PRIMARY KEY,
    shop_id     INTEGER NOT NULL REFERENCES shop (id),
    kind        TEXT    NOT NULL CHECK (kind IN ('ordinary', 'flash_sale')),
    title       TEXT    NOT NULL,
    subtitle    TEXT    NOT NULL,
    rules       TEXT    NOT NULL,
    price_cents INTEGER NOT NULL CHECK (price_cents >= 0),
    worth_cents INTEGER NOT NULL CHECK (worth_cents >= 0),
    on_shelf    INTEGER NOT NULL CHECK (on_shelf IN (0, 1))
) STRICT;

CREATE INDEX shop_by_type ON shop (type_id, id);

CREATE INDEX voucher_by_shop ON voucher (shop_id, id);

CREATE TABLE sale (
    id          INTEGER PRIMARY KEY,
    voucher_id  INTEGER NOT NULL UNIQUE REFERENCES voucher (id),
    price_cents INTEGER NOT NULL,
    status      TEXT    NOT NULL CHECK (status IN ('draft', 'on_sale', 'paused', 'ended')),
    begin_at    INTEGER NOT NULL,
    end_at      INTEGER NOT NULL,
    total       INTEGER NOT NULL CHECK (total >= 0),
    cap         INTEGER NOT NULL CHECK (cap >= 0),
    sold        INTEGER NOT NULL DEFAULT 0,
    released    INTEGER NOT NULL DEFAULT 0, -- number of released orders: other nodes detect by it that marks have changed
    epoch       INTEGER NOT NULL DEFAULT 1,
    ver         INTEGER NOT NULL DEFAULT 1,
    -- The orders of users up to this id are in orders_by_user: -1 none, the maximum all.
    orders_indexed_to INTEGER NOT NULL DEFAULT -1,
    created_at  INTEGER NOT NULL,
    CHECK (end_at > begin_at),
    CHECK (sold >= 0 AND sold <= total)
) STRICT;

CREATE INDEX sale_by_end ON sale (end_at);

CREATE INDEX sale_by_indexed ON sale (orders_indexed_to, end_at);

CREATE TABLE orders (
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
    -- Not `status IN (…)`: SQLite would build a temporary table of the values at every insert.
    CHECK ((live IS NOT NULL) = (status = 'unpaid' OR status = 'paid' OR status = 'redeemed' OR status = 'pending'))
) STRICT;

-- Marks that must still be released in the gate: inserted with the cancellation, deleted after the release.
CREATE TABLE pending_releases (
    order_id INTEGER PRIMARY KEY,
    sale_id  INTEGER NOT NULL,
    user_id  INTEGER NOT NULL
) STRICT;

-- Orders whose data the database rejects. Their stock stays reserved until an operator retries or discards them.
CREATE TABLE quarantine (
    order_id       INTEGER PRIMARY KEY,
    sale_id        INTEGER NOT NULL,
    user_id        INTEGER NOT NULL,
    epoch          INTEGER NOT NULL,
    seq            INTEGER NOT NULL,
    admitted_at    INTEGER NOT NULL,
    error          TEXT NOT NULL,
    quarantined_at INTEGER NOT NULL
) STRICT;

CREATE INDEX quarantine_by_sale ON quarantine (sale_id);

-- The orders of each user, for sales whose orders were copied here (sale.orders_indexed_to). An index on orders would make every insert more
-- than half as expensive again, so the copy is made after the sale.
CREATE TABLE orders_by_user (
    user_id  INTEGER NOT NULL,
    order_id INTEGER NOT NULL,
    PRIMARY KEY (user_id, order_id)
) STRICT, WITHOUT ROWID;

-- A top-up is applied once, even if its request is repeated.
CREATE TABLE top_up (
    request_id TEXT    PRIMARY KEY,
    sale_id    INTEGER NOT NULL REFERENCES sale (id),
    added      INTEGER NOT NULL,
    at         INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Ids are unique: the time ranges granted for one worker do not overlap.
CREATE TABLE worker_lease (
    worker   INTEGER PRIMARY KEY CHECK (worker BETWEEN 0 AND 1023),
    holder   TEXT    NOT NULL,
    from_ms  INTEGER NOT NULL,
    until_ms INTEGER NOT NULL
) STRICT;

-- Users. One user per phone; a login code belongs to one phone and one request, and is used once; a session can be ended at any time, and a
-- disabled account has none.

CREATE TABLE secret (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- Every lease of a worker number locks this row first, so that they are serialized.
INSERT INTO secret (name, value) VALUES ('lease_lock', x'');

CREATE TABLE person (
    id         INTEGER PRIMARY KEY,
    phone      TEXT NOT NULL UNIQUE,
    nickname   TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    disabled   INTEGER NOT NULL DEFAULT 0 CHECK (disabled = 0 OR disabled = 1)
) STRICT;

-- A phone to which codes were sent. Every transaction about its challenges locks this row first.
CREATE TABLE login_phone (
    phone    TEXT PRIMARY KEY,
    failures INTEGER NOT NULL, -- failed attempts since the last login, over all challenges
    used_at  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX login_phone_by_use ON login_phone (used_at);

-- A login code that was sent. Attempts are counted per challenge: guesses at one do not affect another.
CREATE TABLE login_challenge (
    id         BLOB PRIMARY KEY,
    phone      TEXT NOT NULL,
    address    TEXT NOT NULL, -- of the request; the first 64 bits of IPv6
    code_mac   BLOB NOT NULL,
    digits     INTEGER NOT NULL,
    tries      INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX login_challenge_by_phone ON login_challenge (phone, created_at);

CREATE INDEX login_challenge_by_expiry ON login_challenge (expires_at);

CREATE TABLE session (
    id         BLOB    PRIMARY KEY,
    user_id    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);

-- Every change by an administrator: a row `asked` before it, and a row with the outcome after it. Both have the same action_id: the id of the
-- row `asked`. detail is JSON: the request, or the changes with old and new values.

CREATE TABLE audit (
    id         INTEGER PRIMARY KEY,
    action_id  INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    actor      TEXT NOT NULL,
    address    TEXT NOT NULL,
    request_id TEXT NOT NULL,
    action     TEXT NOT NULL,
    target     TEXT NOT NULL,
    outcome    TEXT NOT NULL,
    detail     TEXT NOT NULL
) STRICT;
CREATE INDEX audit_action ON audit (action_id);
CREATE INDEX audit_target ON audit (target, action_id);

-- Rows are only inserted. A row with an existing id is ignored, also with INSERT OR REPLACE, which fires no DELETE trigger.
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log cannot be changed'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log cannot be changed'); END;
CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id)
BEGIN SELECT RAISE(IGNORE); END;
