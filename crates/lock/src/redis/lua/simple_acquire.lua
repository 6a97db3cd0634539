-- Acquires the simple lock if it is free, or if this lease holds it already.
-- KEYS[1] the lock: a string, the lease id
-- ARGV[2] lease id
-- ARGV[3] TTL, ms
-- Returns {1, ''} acquired; {0, ms} busy, with the remaining TTL
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[2] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return { 1, '' }
