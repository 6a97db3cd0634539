-- Wakes the processes that wait for a load that has ended without storing a value.
-- KEYS[1] the mark of a waiting process
-- ARGV[1] channel for ended loads
-- ARGV[2] the message
-- Returns 1 if a process waited; 0 otherwise
local waited = redis.call('DEL', KEYS[1])
if waited == 1 then
    redis.pcall('PUBLISH', ARGV[1], ARGV[2])
end
return waited
