-- Copies a session, unless there is a copy or it has ended.
-- KEYS[1] the session
-- ARGV[1] the copy
-- ARGV[2] when it expires, in ms
-- Returns what the key holds now
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PXAT', ARGV[2]) then
    return ARGV[1]
end
return redis.call('GET', KEYS[1])
