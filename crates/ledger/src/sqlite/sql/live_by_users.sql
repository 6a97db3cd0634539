-- ?2 is a JSON array of user ids.
SELECT user_id, id FROM orders WHERE sale_id = ?1 AND live = 1 AND user_id IN (SELECT value FROM json_each(?2))
