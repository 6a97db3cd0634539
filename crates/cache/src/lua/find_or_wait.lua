-- Reads a value and its version. If there is none, a message is asked for when its load ends.
-- KEYS[1] the value
-- KEYS[2] its version
-- KEYS[3] that a process waits for its load
-- ARGV[1] how long that is kept, ms
-- Returns {the value or nothing, the version or nothing}
local found = redis.call('MGET', KEYS[1], KEYS[2])
if not found[1] then
    redis.call('SET', KEYS[3], '1', 'PX', ARGV[1])
end
return found
