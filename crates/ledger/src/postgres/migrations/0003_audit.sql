-- Every change by an administrator, before it is made ("asked") and after (its outcome). Rows are only ever added.

CREATE TABLE audit (
    id      BIGINT PRIMARY KEY,
    at      BIGINT NOT NULL,
    actor   TEXT NOT NULL,
    action  TEXT NOT NULL,
    target  TEXT NOT NULL,
    outcome TEXT NOT NULL
);
