-- Releases the simple lock: compare and delete.
-- KEYS[1] the lock
-- ARGV[1] lease id
-- ARGV[2] channel on which waiters are notified
-- Returns 'freed', 'not_held' or 'other'
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
    redis.call('DEL', KEYS[1])
    redis.pcall('PUBLISH', ARGV[2], '')
    return 'freed'
end
return holder and 'other' or 'not_held'
