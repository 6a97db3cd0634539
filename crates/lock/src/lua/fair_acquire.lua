-- The fair lock: who came first, of those who are alive.
-- KEYS[1] the lock: a hash of owner, fence and hold:… for every hold
-- KEYS[2] the last fence
-- KEYS[3] the line: a sorted set of holds by the time they came
-- KEYS[4] the living: a sorted set of the same holds by the time until which they count as alive, ms
-- ARGV[1] owner
-- ARGV[2] hold
-- ARGV[3] lease, ms
-- ARGV[4] memory of the fence, ms
-- ARGV[5] how long a place in the line lasts without a sign of life, ms; 0: do not stand in line
-- Returns {1, fence} held; {0, ms} when it is worth looking again
local owner = redis.call('HGET', KEYS[1], 'owner')
local now = now_us()
local now_ms = math.floor(now / 1000)
if owner ~= ARGV[1] then
    local first, alive_until = first_alive(KEYS[3], KEYS[4], now_ms)
    if owner or (first and first ~= ARGV[2]) then
        if ARGV[5] ~= '0' then
            if not redis.call('ZSCORE', KEYS[3], ARGV[2]) then
                -- Behind the last one, even if the clock went back.
                local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
                redis.call('ZADD', KEYS[3], string.format('%.0f', math.max(now, tonumber(last or '0') + 1)), ARGV[2])
            end
            redis.call('ZADD', KEYS[4], string.format('%.0f', now_ms + ARGV[5]), ARGV[2])
            live(KEYS[3], ARGV[5])
            live(KEYS[4], ARGV[5])
        end
        if owner then
            return { 0, redis.call('PTTL', KEYS[1]) }
        end
        return { 0, alive_until - now_ms }
    end
end
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('ZREM', KEYS[4], ARGV[2])
return take(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
