-- Acquires the re-entrant lock if it is free, or if this owner holds it already.
-- KEYS[1] the lock: a hash of owner, fence and lease:<id> for every lease
-- KEYS[2] the last fencing token
-- ARGV[1] owner
-- ARGV[2] lease id
-- ARGV[3] TTL, ms
-- ARGV[4] TTL of the fencing token, ms
-- Returns {1, fence} acquired; {0, ms} busy, with the remaining TTL
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
return acquire(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
