-- The invariants that these tables enforce, independent of the gate:
--   * an order id exists once                         orders.id PRIMARY KEY
--   * one live order per user and sale                UNIQUE (sale_id, user_id, live), live = 1 or NULL
--   * never more sold than the stock                  CHECK (sold <= total)
--   * one sale per voucher                            UNIQUE (voucher_id)
-- Times are in milliseconds since the Unix epoch, money is in cents.

CREATE TABLE shop_type (
    id   BIGINT PRIMARY KEY,
    name VARCHAR(128) NOT NULL,
    sort BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO shop_type (id, name, sort) VALUES
    (1, '美食', 1), (2, 'KTV', 2), (3, '丽人', 3), (4, '健身', 4), (5, '休闲', 5);

CREATE TABLE shop (
    id      BIGINT PRIMARY KEY,
    type_id BIGINT NOT NULL,
    name    VARCHAR(128) NOT NULL,
    -- In lower case, for searches; a character may become two.
    folded_name VARCHAR(256) NOT NULL,
    address VARCHAR(255) NOT NULL,
    FOREIGN KEY (type_id) REFERENCES shop_type (id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The n-grams of one, two and three characters of every shop's folded name, for searches for a part of a name.
-- Binary, because MySQL ignores trailing spaces when it compares texts.
CREATE TABLE shop_gram (
    gram    VARBINARY(12) NOT NULL,
    shop_id BIGINT NOT NULL,
    PRIMARY KEY (gram, shop_id)
) ENGINE = InnoDB;

CREATE TABLE voucher (
    id          BIGINT PRIMARY KEY,
    shop_id     BIGINT NOT NULL,
    kind        VARCHAR(16) NOT NULL CHECK (kind IN ('ordinary', 'flash_sale')),
    title       VARCHAR(255) NOT NULL,
    subtitle    VARCHAR(255) NOT NULL,
    rules       VARCHAR(1024) NOT NULL,
    price_cents BIGINT NOT NULL CHECK (price_cents >= 0),
    worth_cents BIGINT NOT NULL CHECK (worth_cents >= 0),
    on_shelf    BIGINT NOT NULL CHECK (on_shelf IN (0, 1)),
    FOREIGN KEY (shop_id) REFERENCES shop (id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX shop_by_type ON shop (type_id, id);

CREATE INDEX voucher_by_shop ON voucher (shop_id, id);

CREATE TABLE sale (
    id          BIGINT PRIMARY KEY,
    voucher_id  BIGINT NOT NULL UNIQUE,
    price_cents BIGINT NOT NULL,
    status      VARCHAR(16) NOT NULL CHECK (status IN ('draft', 'on_sale', 'paused', 'ended')),
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
    FOREIGN KEY (voucher_id) REFERENCES voucher (id),
    CHECK (end_at > begin_at),
    CHECK (sold >= 0 AND sold <= total)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX sale_by_end ON sale (end_at);

CREATE INDEX sale_by_indexed ON sale (orders_indexed_to, end_at);

CREATE TABLE orders (
    id          BIGINT PRIMARY KEY,
    sale_id     BIGINT NOT NULL,
    user_id     BIGINT NOT NULL,
    live        BIGINT CHECK (live = 1),
    status      VARCHAR(16) NOT NULL,
    reason      VARCHAR(16),
    epoch       BIGINT NOT NULL,
    seq         BIGINT NOT NULL,
    price_cents BIGINT NOT NULL,
    created_at  BIGINT NOT NULL,
    updated_at  BIGINT NOT NULL,
    UNIQUE (sale_id, user_id, live),
    CHECK ((live IS NOT NULL) = (status IN ('pending', 'unpaid', 'paid', 'redeemed')))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Marks that must still be released in the gate: inserted with the cancellation, deleted after the release.
CREATE TABLE pending_releases (
    order_id BIGINT PRIMARY KEY,
    sale_id  BIGINT NOT NULL,
    user_id  BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

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
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX quarantine_by_sale ON quarantine (sale_id);

-- The orders of each user, for sales whose orders were copied here (sale.orders_indexed_to). An index on orders would make every insert more
-- than half as expensive again, so the copy is made after the sale.
CREATE TABLE orders_by_user (
    user_id  BIGINT NOT NULL,
    order_id BIGINT NOT NULL,
    PRIMARY KEY (user_id, order_id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A top-up is applied once, even if its request is repeated.
CREATE TABLE top_up (
    request_id VARCHAR(64) PRIMARY KEY,
    sale_id    BIGINT NOT NULL,
    added      BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    FOREIGN KEY (sale_id) REFERENCES sale (id)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Ids are unique: the time ranges granted for one worker do not overlap.
CREATE TABLE worker_lease (
    worker   BIGINT PRIMARY KEY CHECK (worker BETWEEN 0 AND 1023),
    holder   VARCHAR(64) NOT NULL,
    from_ms  BIGINT NOT NULL,
    until_ms BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Users. One user per phone; a login code belongs to one phone and one request, and is used once; a session can be ended at any time, and a
-- disabled account has none.

CREATE TABLE secret (
    name  VARCHAR(128) PRIMARY KEY,
    value VARBINARY(255) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Every lease of a worker number locks this row first, so that they are serialized.
INSERT INTO secret (name, value) VALUES ('lease_lock', '');

CREATE TABLE person (
    id         BIGINT PRIMARY KEY,
    phone      VARCHAR(16) NOT NULL UNIQUE,
    nickname   VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL,
    disabled   BIGINT NOT NULL DEFAULT 0 CHECK (disabled = 0 OR disabled = 1)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A phone to which codes were sent. Every transaction about its challenges locks this row first.
CREATE TABLE login_phone (
    phone    VARCHAR(16) PRIMARY KEY,
    failures BIGINT NOT NULL, -- failed attempts since the last login, over all challenges
    used_at  BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX login_phone_by_use ON login_phone (used_at);

-- A login code that was sent. Attempts are counted per challenge: guesses at one do not affect another.
CREATE TABLE login_challenge (
    id         BINARY(16) PRIMARY KEY,
    phone      VARCHAR(16) NOT NULL,
    address    VARCHAR(45) NOT NULL, -- of the request; the first 64 bits of IPv6
    code_mac   VARBINARY(64) NOT NULL,
    digits     BIGINT NOT NULL,
    tries      BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX login_challenge_by_phone ON login_challenge (phone, created_at);

CREATE INDEX login_challenge_by_expiry ON login_challenge (expires_at);

CREATE TABLE session (
    id         BINARY(16) PRIMARY KEY,
    user_id    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);

-- Every change by an administrator: a row `asked` before it, and a row with the outcome after it. Both have the same action_id: the id of the
-- row `asked`. detail is JSON: the request, or the changes with old and new values.

CREATE TABLE audit (
    id         BIGINT PRIMARY KEY,
    action_id  BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    actor      VARCHAR(512) NOT NULL,
    address    VARCHAR(64) NOT NULL,
    request_id VARCHAR(64) NOT NULL,
    action     VARCHAR(64) NOT NULL,
    target     VARCHAR(128) NOT NULL,
    outcome    VARCHAR(64) NOT NULL,
    detail     TEXT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX audit_action ON audit (action_id);
CREATE INDEX audit_target ON audit (target, action_id);

-- Rows are only inserted: audit_triggers.rs creates the triggers that reject UPDATE and DELETE, because a server with a binary log allows only
-- some accounts to create triggers, and a failed migration cannot be repeated.
