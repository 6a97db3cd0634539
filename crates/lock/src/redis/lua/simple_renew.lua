-- Renews the simple lock.
-- KEYS[1] the lock
-- ARGV[1] lease id
-- ARGV[2] TTL, ms
-- Returns 1 renewed; 0 no longer held
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
