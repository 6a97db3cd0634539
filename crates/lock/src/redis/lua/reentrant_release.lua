-- Removes a lease; the last one frees the lock. Also for the write lock.
-- KEYS[1] the lock
-- ARGV[1] lease id
-- ARGV[2] channel on which waiters are notified
-- Returns 'freed', 'held', 'not_held' or 'other'
local outcome = release(KEYS[1], ARGV[1])
if outcome == 'freed' then
    redis.pcall('PUBLISH', ARGV[2], '')
end
return outcome
