-- Renews a lease of the read lock.
-- KEYS[3] the readers
-- ARGV[1] lease id
-- ARGV[2] TTL, ms
-- Returns 1 renewed; 0 no longer held
local now_ms = math.floor(now_us() / 1000)
local expiry = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not expiry or tonumber(expiry) <= now_ms then
    return 0
end
redis.call('ZADD', KEYS[3], 'GT', string.format('%.0f', now_ms + ARGV[2]), ARGV[1])
extend_ttl(KEYS[3], ARGV[2])
return 1
