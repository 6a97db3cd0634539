-- Every change by an administrator, before it is made ("asked") and after (its outcome). Rows are only ever added.

CREATE TABLE audit (
    id      BIGINT PRIMARY KEY,
    at      BIGINT NOT NULL,
    actor   VARCHAR(512) NOT NULL,
    action  VARCHAR(512) NOT NULL,
    target  VARCHAR(512) NOT NULL,
    outcome VARCHAR(512) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
