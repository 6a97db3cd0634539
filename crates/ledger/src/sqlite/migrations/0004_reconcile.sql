-- What reconciling gate and ledger has found and done, and when somebody was last told of a case.

CREATE TABLE reconcile_log (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    at       INTEGER NOT NULL,
    sale_id  INTEGER NOT NULL,
    order_id INTEGER,
    finding  TEXT NOT NULL,
    detail   TEXT NOT NULL,
    outcome  TEXT NOT NULL
) STRICT;

CREATE TABLE alert (
    alert_case TEXT PRIMARY KEY,
    sent_at    INTEGER NOT NULL
) STRICT;

INSERT INTO fence (work, token) VALUES ('reconcile', 0);
