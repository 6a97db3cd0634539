-- The edits of a sale's status and window; those of its stock are in stock_change.
--   * an edit is carried out once per request id      sale_edit.request_id PRIMARY KEY
--   * check knows the settings of every time          a row is written in the transaction that edits the sale
-- An edit without a request id of the operator has an internal one with a space, which no operator can send.

CREATE TABLE sale_edit (
    request_id   TEXT PRIMARY KEY,
    sale_id      INTEGER NOT NULL REFERENCES sale (id),
    asked_at     INTEGER NOT NULL,
    applied_at   INTEGER NOT NULL, -- when the gate was known to have it; 0 until then
    ver          INTEGER NOT NULL, -- of the sale, with the edit
    -- What was asked for, and what it replaced. An edit is one of the status or one of the window.
    status       TEXT,
    old_status   TEXT,
    begin_at     INTEGER, -- NULL: stays as it was
    end_at       INTEGER,
    old_begin_at INTEGER,
    old_end_at   INTEGER,
    CHECK ((status IS NULL) = (old_status IS NULL)),
    CHECK ((status IS NULL) = (old_begin_at IS NOT NULL AND old_end_at IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE INDEX sale_edit_by_sale ON sale_edit (sale_id, ver);

-- For those that the gate may not have.
CREATE INDEX sale_edit_by_applied ON sale_edit (applied_at, sale_id);
