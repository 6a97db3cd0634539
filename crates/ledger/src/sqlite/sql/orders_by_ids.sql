-- ?1 is a JSON array of order ids.
SELECT id, sale_id, user_id, live FROM orders WHERE id IN (SELECT value FROM json_each(?1))
