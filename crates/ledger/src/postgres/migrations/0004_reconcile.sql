-- What reconciling gate and ledger has found and done, and when somebody was last told of a case.

CREATE TABLE reconcile_log (
    id       BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    at       BIGINT NOT NULL,
    sale_id  BIGINT NOT NULL,
    order_id BIGINT,
    finding  TEXT NOT NULL,
    detail   TEXT NOT NULL,
    outcome  TEXT NOT NULL
);

CREATE TABLE alert (
    alert_case TEXT PRIMARY KEY,
    sent_at    BIGINT NOT NULL
);

INSERT INTO fence (work, token) VALUES ('reconcile', 0);
