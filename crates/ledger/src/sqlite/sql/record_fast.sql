-- The whole batch as live orders: ?3 is a JSON array of [id, user, seq, at].
-- Fewer rows than asked for means a conflict: the caller rolls back and takes the slow way.
INSERT INTO orders (id, sale_id, user_id, live, status, epoch, seq, price_cents, created_at, updated_at)
SELECT value ->> 0, ?1, value ->> 1, 1, 'unpaid', ?2, value ->> 2, sale.price_cents, value ->> 3, value ->> 3
FROM json_each(?3), sale
WHERE sale.id = ?1
ON CONFLICT DO NOTHING
