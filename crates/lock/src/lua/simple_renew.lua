-- KEYS[1] the lock
-- ARGV[1] hold
-- ARGV[2] lease, ms
-- Returns 1 renewed; 0 not held any more
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
    return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
