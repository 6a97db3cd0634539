-- What the slow way decided: ?3 is a JSON array of [id, user, seq, at, live, status, reason]. No conflict is possible any more.
INSERT INTO orders (id, sale_id, user_id, live, status, reason, epoch, seq, price_cents, created_at, updated_at)
SELECT value ->> 0, ?1, value ->> 1, value ->> 4, value ->> 5, value ->> 6, ?2, value ->> 2, sale.price_cents,
       value ->> 3, value ->> 3
FROM json_each(?3), sale
WHERE sale.id = ?1
