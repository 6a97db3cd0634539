-- The gate in Redis: which incarnation of it is valid, and which sales are open in it.
--   * one rebuild wins                                gate.incarnation is replaced by compare-and-set
--   * no two tiers at the same time                   worker_lease.tier of the leases that have not ended

CREATE TABLE gate (
    id          BIGINT PRIMARY KEY CHECK (id = 1),
    ledger_id   VARCHAR(32) NOT NULL, -- part of every key in Redis; empty until the first start
    tier        VARCHAR(16) NOT NULL, -- the tier that ran last; empty until the first start
    incarnation BIGINT NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT INTO gate (id, ledger_id, tier, incarnation) VALUES (1, '', '', 1);

ALTER TABLE sale ADD COLUMN phase VARCHAR(16) NOT NULL DEFAULT 'loading' CHECK (phase IN ('open', 'closing', 'loading'));

ALTER TABLE worker_lease ADD COLUMN tier VARCHAR(16) NOT NULL DEFAULT '';
