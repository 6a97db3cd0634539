-- What reconciling gate and ledger has found and done, and when somebody was last told of a case.

CREATE TABLE reconcile_log (
    id       BIGINT PRIMARY KEY AUTO_INCREMENT,
    at       BIGINT NOT NULL,
    sale_id  BIGINT NOT NULL,
    order_id BIGINT,
    finding  VARCHAR(32) NOT NULL,
    detail   VARCHAR(1024) NOT NULL,
    outcome  VARCHAR(16) NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE TABLE alert (
    alert_case VARCHAR(128) PRIMARY KEY,
    sent_at    BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO fence (work, token) VALUES ('reconcile', 0);
