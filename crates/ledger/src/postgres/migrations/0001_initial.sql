-- The invariants that these tables enforce, independent of the gate:
--   * an order id exists once                         orders.id PRIMARY KEY
--   * one live order per user and sale                UNIQUE (sale_id, user_id, live), live = 1 or NULL
--   * never more sold than the stock                  CHECK (sold <= total)
--   * one sale per voucher                            UNIQUE (voucher_id)
-- Times are in milliseconds since the Unix epoch, money is in cents.

CREATE TABLE shop_type (
    id   BIGINT PRIMARY KEY,
    name TEXT    NOT NULL,
    sort BIGINT NOT NULL
);

INSERT INTO shop_type (id, name, sort) VALUES
    (1, '美食', 1), (2, 'KTV', 2), (3, '丽人', 3), (4, '健身', 4), (5, '休闲', 5);

CREATE TABLE shop (
    id      BIGINT PRIMARY KEY,
    type_id BIGINT NOT NULL REFERENCES shop_type (id),
    name    TEXT    NOT NULL,
    -- In lower case, for searches.
    folded_name TEXT NOT NULL,
    address TEXT    NOT NULL
);

-- The n-grams of one, two and three characters of every shop's folded name, for searches for a part of a name.
CREATE TABLE shop_gram (
    gram    TEXT COLLATE "C" NOT NULL,
    shop_id BIGINT NOT NULL,
    PRIMARY KEY (gram, shop_id)
);

CREATE TABLE voucher (
    id          BIGINT PRIMARY KEY,
    shop_id     BIGINT NOT NULL REFERENCES shop (id),
    kind        TEXT    NOT NULL CHECK (kind IN ('ordinary', 'flash_sale')),
    title       TEXT    NOT NULL,
    subtitle    TEXT    NOT NULL,
    rules       TEXT    NOT NULL,
    price_cents BIGINT NOT NULL CHECK (price_cents >= 0),
    worth_cents BIGINT NOT NULL CHECK (worth_cents >= 0),
    on_shelf    BIGINT NOT NULL CHECK (on_shelf IN (0, 1))
);

CREATE INDEX shop_by_type ON shop (type_id, id);

CREATE INDEX voucher_by_shop ON voucher (shop_id, id);

CREATE TABLE sale (
    id          BIGINT PRIMARY KEY,
    voucher_id  BIGINT NOT NULL UNIQUE REFERENCES voucher (id),
    price_cents BIGINT NOT NULL,
    status      TEXT    NOT NULL CHECK (status IN ('draft', 'on_sale', 'paused', 'ended')),
    begin_at    BIGINT NOT NULL,
    end_at      BIGINT NOT NULL,
    total       BIGINT NOT NULL CHECK (total >= 0),
    cap         BIGINT NOT NULL CHECK (cap >= 0),
    sold        BIGINT NOT NULL DEFAULT 0,
    released    BIGINT NOT NULL DEFAULT 0, -- number of released orders: other nodes detect by it that marks have changed
    epoch       BIGINT NOT NULL DEFAULT 1,
    ver         BIGINT NOT NULL DEFAULT 1,
    -- The orders of users up to this id are in orders_by_user: -1 none, the maximum all.
    orders_indexed_to BIGINT NOT NULL DEFAULT -1,
    created_at  BIGINT NOT NULL,
    CHECK (end_at > begin_at),
    CHECK (sold >= 0 AND sold <= total)
);

CREATE INDEX sale_by_end ON sale (end_at);

CREATE INDEX sale_by_indexed ON sale (orders_indexed_to, end_at);

CREATE TABLE orders (
    id          BIGINT PRIMARY KEY,
    sale_id     BIGINT NOT NULL,
    user_id     BIGINT NOT NULL,
    live        BIGINT CHECK (live = 1),
    status      TEXT    NOT NULL,
    reason      TEXT,
    epoch       BIGINT NOT NULL,
    seq         BIGINT NOT NULL,
    price_cents BIGINT NOT NULL,
    created_at  BIGINT NOT NULL,
    updated_at  BIGINT NOT NULL,
    UNIQUE (sale_id, user_id, live),
    CHECK ((live IS NOT NULL) = (status IN ('pending', 'unpaid', 'paid', 'redeemed')))
);

-- Marks that must still be released in the gate: inserted with the cancellation, deleted after the release.
CREATE TABLE pending_releases (
    order_id BIGINT PRIMARY KEY,
    sale_id  BIGINT NOT NULL,
    user_id  BIGINT NOT NULL
);

-- Orders whose data the database rejects. Their stock stays reserved until an operator retries or discards them.
CREATE TABLE quarantine (
    order_id       BIGINT PRIMARY KEY,
    sale_id        BIGINT NOT NULL,
    user_id        BIGINT NOT NULL,
    epoch          BIGINT NOT NULL,
    seq            BIGINT NOT NULL,
    admitted_at    BIGINT NOT NULL,
    error          TEXT NOT NULL,
    quarantined_at BIGINT NOT NULL
);

CREATE INDEX quarantine_by_sale ON quarantine (sale_id);

-- The orders of each user, for sales whose orders were copied here (sale.orders_indexed_to). An index on orders would make every insert more
-- than half as expensive again, so the copy is made after the sale.
CREATE TABLE orders_by_user (
    user_id  BIGINT NOT NULL,
    order_id BIGINT NOT NULL,
    PRIMARY KEY (user_id, order_id)
);

-- A top-up is applied once, even if its request is repeated.
CREATE TABLE top_up (
    request_id TEXT    PRIMARY KEY,
    sale_id    BIGINT NOT NULL REFERENCES sale (id),
    added      BIGINT NOT NULL,
    at         BIGINT NOT NULL
);

-- Ids are unique: the time ranges granted for one worker do not overlap.
CREATE TABLE worker_lease (
    worker   BIGINT PRIMARY KEY CHECK (worker BETWEEN 0 AND 1023),
    holder   TEXT    NOT NULL,
    from_ms  BIGINT NOT NULL,
    until_ms BIGINT NOT NULL
);

-- Users. One user per phone; a login code belongs to one phone and one request, and is used once; a session can be ended at any time, and a
-- disabled account has none.

CREATE TABLE secret (
    name  TEXT PRIMARY KEY,
    value BYTEA NOT NULL
);

-- Every lease of a worker number locks this row first, so that they are serialized.
INSERT INTO secret (name, value) VALUES ('lease_lock', '');

CREATE TABLE person (
    id         BIGINT PRIMARY KEY,
    phone      TEXT NOT NULL UNIQUE,
    nickname   TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    disabled   BIGINT NOT NULL DEFAULT 0 CHECK (disabled = 0 OR disabled = 1)
);

-- A phone to which codes were sent. Every transaction about its challenges locks this row first.
CREATE TABLE login_phone (
    phone    TEXT PRIMARY KEY,
    failures BIGINT NOT NULL, -- failed attempts since the last login, over all challenges
    used_at  BIGINT NOT NULL
);

CREATE INDEX login_phone_by_use ON login_phone (used_at);

-- A login code that was sent. Attempts are counted per challenge: guesses at one do not affect another.
CREATE TABLE login_challenge (
    id         BYTEA PRIMARY KEY,
    phone      TEXT NOT NULL,
    address    TEXT NOT NULL, -- of the request; the first 64 bits of IPv6
    code_mac   BYTEA NOT NULL,
    digits     BIGINT NOT NULL,
    tries      BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE INDEX login_challenge_by_phone ON login_challenge (phone, created_at);

CREATE INDEX login_challenge_by_expiry ON login_challenge (expires_at);

CREATE TABLE session (
    id         BYTEA    PRIMARY KEY,
    user_id    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);

-- Every change by an administrator: a row `asked` before it, and a row with the outcome after it. Both have the same action_id: the id of the
-- row `asked`. detail is JSON: the request, or the changes with old and new values.

CREATE TABLE audit (
    id         BIGINT PRIMARY KEY,
    action_id  BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    actor      TEXT NOT NULL,
    address    TEXT NOT NULL,
    request_id TEXT NOT NULL,
    action     TEXT NOT NULL,
    target     TEXT NOT NULL,
    outcome    TEXT NOT NULL,
    detail     TEXT NOT NULL
);
CREATE INDEX audit_action ON audit (action_id);
CREATE INDEX audit_target ON audit (target, action_id);

-- Rows are only ever added.
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log cannot be changed';
END $$;
CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only();
