-- One hold less; the last one frees the lock. Also for the writer of a read-write lock.
-- KEYS[1] the lock
-- ARGV[1] hold
-- ARGV[2] channel on which the waiting are told
-- Returns 'freed', 'held', 'gone' or 'other'
local outcome = give_back(KEYS[1], ARGV[1])
if outcome == 'freed' then
    redis.pcall('PUBLISH', ARGV[2], '')
end
return outcome
