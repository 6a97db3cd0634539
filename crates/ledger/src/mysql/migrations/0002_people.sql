-- Who buys. One user per phone; a login code belongs to one phone and is used once; a session can be ended at any moment.

CREATE TABLE secret (
    name  VARCHAR(128) PRIMARY KEY,
    value VARBINARY(255) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Whoever leases a worker number locks this row first, so that they come one after the other.
INSERT INTO secret (name, value) VALUES ('lease_lock', '');

CREATE TABLE person (
    id         BIGINT PRIMARY KEY,
    phone      VARCHAR(16) NOT NULL UNIQUE,
    nickname   VARCHAR(64) NOT NULL,
    created_at BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE login_code (
    phone      VARCHAR(16) PRIMARY KEY,
    seal       VARBINARY(64) NOT NULL,
    tries      BIGINT NOT NULL, -- of this code
    expires_at BIGINT NOT NULL,
    all_tries  BIGINT NOT NULL, -- of this phone since its last login; a new code does not reset it
    tried_at   BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX login_code_by_expiry ON login_code (expires_at);

CREATE TABLE session (
    id         BINARY(16) PRIMARY KEY,
    user_id    BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE INDEX session_by_expiry ON session (expires_at);

CREATE INDEX session_by_user ON session (user_id);
