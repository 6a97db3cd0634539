-- Reads what Redis holds about a session. It writes first, and fails while Redis refuses writes: then the end of a session cannot be
-- written either, so no copy may be used.
-- KEYS[1] the copy
-- KEYS[2] the end of the session
-- KEYS[3] the revocation of all sessions of its user
-- KEYS[4] the key that is written
-- ARGV[1] how long that key is kept, in ms
-- Returns the values of the first three keys
redis.call('SET', KEYS[4], '1', 'PX', ARGV[1])
return redis.call('MGET', KEYS[1], KEYS[2], KEYS[3])
