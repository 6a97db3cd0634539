-- Who buys. One user per phone; a login code belongs to one phone and is used once; a session can be ended at any moment.

CREATE TABLE secret (
    name  TEXT PRIMARY KEY,
    value BYTEA NOT NULL
);

-- Whoever leases a worker number locks this row first, so that they come one after the other.
INSERT INTO secret (name, value) VALUES ('lease_lock', '');

CREATE TABLE person (
    id         BIGINT PRIMARY KEY,
    phone      TEXT    NOT NULL UNIQUE,
    nickname   TEXT    NOT NULL,
    created_at BIGINT NOT NULL
);

CREATE TABLE login_code (
    phone      TEXT    PRIMARY KEY,
    seal       BYTEA    NOT NULL,
    tries      BIGINT NOT NULL, -- of this code
    expires_at BIGINT NOT NULL,
    all_tries  BIGINT NOT NULL, -- of this phone since its last login; a new code does not reset it
    tried_at   BIGINT NOT NULL
);

CREATE INDEX login_code_by_expiry ON login_code (expires_at);

CREATE TABLE session (
    id         BYTEA    PRIMARY KEY,
    user_id    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
);

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);
