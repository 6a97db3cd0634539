-- Acquires the fair lock if it is free and this lease is first in the queue, or if this owner holds it already; otherwise queues.
-- KEYS[1] the lock: a hash of owner, fence and lease:<id> for every lease
-- KEYS[2] the last fencing token
-- KEYS[3] the queue: a sorted set of lease ids by the time of arrival
-- KEYS[4] a sorted set of the same ids by the time at which their queue entries expire, ms
-- ARGV[1] owner
-- ARGV[2] lease id
-- ARGV[3] TTL, ms
-- ARGV[4] TTL of the fencing token, ms
-- ARGV[5] TTL of the queue entry, ms; 0: do not queue
-- Returns {1, fence} acquired; {0, ms} busy, with the time until the next check
local owner = redis.call('HGET', KEYS[1], 'owner')
local now = now_us()
local now_ms = math.floor(now / 1000)
if owner ~= ARGV[1] then
    local first, alive_until = first_alive(KEYS[3], KEYS[4], now_ms)
    if owner or (first and first ~= ARGV[2]) then
        if ARGV[5] ~= '0' then
            if not redis.call('ZSCORE', KEYS[3], ARGV[2]) then
                -- Behind the last entry, even if the clock went back.
                local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
                redis.call('ZADD', KEYS[3], string.format('%.0f', math.max(now, tonumber(last or '0') + 1)), ARGV[2])
            end
            redis.call('ZADD', KEYS[4], string.format('%.0f', now_ms + ARGV[5]), ARGV[2])
            extend_ttl(KEYS[3], ARGV[5])
            extend_ttl(KEYS[4], ARGV[5])
        end
        if owner then
            return { 0, redis.call('PTTL', KEYS[1]) }
        end
        return { 0, alive_until - now_ms }
    end
end
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
return acquire(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
