-- A load has ended without a value: wakes the processes that wait for it.
-- KEYS[1] that a process waits for the load
-- ARGV[1] channel for loads that have ended
-- ARGV[2] the message
-- Returns 1 if a process waited; 0 otherwise
local waited = redis.call('DEL', KEYS[1])
if waited == 1 then
    redis.pcall('PUBLISH', ARGV[1], ARGV[2])
end
return waited
