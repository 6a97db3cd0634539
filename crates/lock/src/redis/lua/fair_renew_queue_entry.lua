-- Renews the queue entry of a waiter for the fair lock.
-- KEYS[3] the queue
-- KEYS[4] the expiry of the queue entries
-- ARGV[1] lease id
-- ARGV[2] TTL of the queue entry, ms
-- Returns 1 renewed; 0 the entry has expired
if not redis.call('ZSCORE', KEYS[4], ARGV[1]) then
    return 0
end
redis.call('ZADD', KEYS[4], string.format('%.0f', math.floor(now_us() / 1000) + ARGV[2]), ARGV[1])
extend_ttl(KEYS[3], ARGV[2])
extend_ttl(KEYS[4], ARGV[2])
return 1
