-- The highest token with which scheduled work was done: work with a lower one is refused.

CREATE TABLE fence (
    work  TEXT    PRIMARY KEY,
    token INTEGER NOT NULL
) STRICT;

INSERT INTO fence (work, token) VALUES ('index_orders', 0), ('delete_expired', 0);
