-- Acquires the write lock if there is no other writer and no reader, or if this owner holds it already.
-- KEYS[1] the write lock: a hash of owner, fence and lease:<id> for every lease
-- KEYS[2] the last fencing token
-- KEYS[3] the readers: a sorted set of lease ids (owner:…) by expiry, ms
-- ARGV[1] owner
-- ARGV[2] lease id
-- ARGV[3] TTL, ms
-- ARGV[4] TTL of the fencing token, ms
-- Returns {1, fence} acquired; {0, ms} busy, with the remaining TTL of the writer, {0, ms, 1} of the readers; {-1, 0} this owner is a reader and would wait for itself
local writer = redis.call('HGET', KEYS[1], 'owner')
if writer and writer ~= ARGV[1] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
if not writer then
    local now_ms = math.floor(now_us() / 1000)
    redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
    local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
    if last then
        for _, reader in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
            if string.sub(reader, 1, #ARGV[1]) == ARGV[1] then
                return { -1, 0 }
            end
        end
        return { 0, tonumber(last) - now_ms, 1 }
    end
end
return acquire(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
