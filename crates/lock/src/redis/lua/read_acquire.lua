-- Acquires the read lock if no other owner holds the write lock. The owner of the write lock gets the fencing token of the write lock.
-- KEYS[1] the write lock: a hash of owner, fence and lease:<id> for every lease
-- KEYS[2] the last fencing token
-- KEYS[3] the readers: a sorted set of lease ids (owner:…) by expiry, ms
-- ARGV[1] owner
-- ARGV[2] lease id
-- ARGV[3] TTL, ms
-- ARGV[4] TTL of the fencing token, ms
-- Returns {1, fence} acquired; {0, ms} busy, with the remaining TTL of the writer
local writer = redis.call('HGET', KEYS[1], 'owner')
if writer and writer ~= ARGV[1] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
local fence = writer and redis.call('HGET', KEYS[1], 'fence') or next_fence(KEYS[2], ARGV[4])
local now_ms = math.floor(now_us() / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
redis.call('ZADD', KEYS[3], string.format('%.0f', now_ms + ARGV[3]), ARGV[2])
extend_ttl(KEYS[3], ARGV[3])
return { 1, fence }
