-- A rebuild of the gate begins without a change of any sale.
--   * no sale is open under an older incarnation      sale.phase 'open' counts only if sale.incarnation = gate.incarnation

-- The incarnation of the gate under which the sale was last opened; 0 if it never was.
ALTER TABLE sale ADD COLUMN incarnation BIGINT NOT NULL DEFAULT 0;

UPDATE sale SET incarnation = (SELECT incarnation FROM gate WHERE id = 1) WHERE phase = 'open';
