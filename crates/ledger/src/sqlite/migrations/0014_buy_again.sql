-- Sales in which nobody may buy again.
--   * a user whose order has ended gets no other      the slow path of recording, which such a sale always takes, reads the user's orders

-- 1 if a buyer whose order has ended may buy again. Sales that exist allow it.
ALTER TABLE sale ADD COLUMN buy_again INTEGER NOT NULL DEFAULT 1 CHECK (buy_again IN (0, 1));
