-- The write lock: nobody else writes, and nobody reads; or this owner writes already.
-- KEYS[1] the writer: a hash of owner, fence and hold:… for every hold
-- KEYS[2] the last fence
-- KEYS[3] the readers: a sorted set of holds (owner:…) by the end of their leases, ms
-- ARGV[1] owner
-- ARGV[2] hold
-- ARGV[3] lease, ms
-- ARGV[4] memory of the fence, ms
-- Returns {1, fence} held; {0, ms} what is left of the writer's lease, {0, ms, 1} of the readers'; {-1, 0} this owner reads, and would wait for itself
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
return take(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
