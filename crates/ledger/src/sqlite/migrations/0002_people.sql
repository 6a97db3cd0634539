-- Who buys. One user per phone; a login code belongs to one phone and is used once; a session can be ended at any moment.

CREATE TABLE secret (
    name  TEXT PRIMARY KEY,
    value BLOB NOT NULL
) STRICT, WITHOUT ROWID;

-- Whoever leases a worker number locks this row first, so that they come one after the other.
INSERT INTO secret (name, value) VALUES ('lease_lock', x'');

CREATE TABLE person (
    id         INTEGER PRIMARY KEY,
    phone      TEXT    NOT NULL UNIQUE,
    nickname   TEXT    NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE login_code (
    phone      TEXT    PRIMARY KEY,
    seal       BLOB    NOT NULL,
    tries      INTEGER NOT NULL, -- of this code
    expires_at INTEGER NOT NULL,
    all_tries  INTEGER NOT NULL, -- of this phone since its last login; a new code does not reset it
    tried_at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX login_code_by_expiry ON login_code (expires_at);

CREATE TABLE session (
    id         BLOB    PRIMARY KEY,
    user_id    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);
