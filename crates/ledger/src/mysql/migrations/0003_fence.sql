-- The highest token with which scheduled work was done: work with a lower one is refused.

CREATE TABLE fence (
    work  VARCHAR(32) PRIMARY KEY,
    token BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO fence (work, token) VALUES ('index_orders', 0), ('delete_expired', 0);
