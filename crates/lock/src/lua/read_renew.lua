-- KEYS[3] the readers
-- ARGV[1] hold
-- ARGV[2] lease, ms
-- Returns 1 renewed; 0 not held any more
local now_ms = math.floor(now_us() / 1000)
local ends = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not ends or tonumber(ends) <= now_ms then
    return 0
end
redis.call('ZADD', KEYS[3], 'GT', string.format('%.0f', now_ms + ARGV[2]), ARGV[1])
live(KEYS[3], ARGV[2])
return 1
