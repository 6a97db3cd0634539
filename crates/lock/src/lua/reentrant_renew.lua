-- Also for the fair lock and the writer of a read-write lock.
-- KEYS[1] the lock
-- ARGV[1] hold
-- ARGV[2] lease, ms
-- Returns 1 renewed; 0 not held any more
if redis.call('HEXISTS', KEYS[1], 'hold:' .. ARGV[1]) == 0 then
    return 0
end
live(KEYS[1], ARGV[2])
return 1
