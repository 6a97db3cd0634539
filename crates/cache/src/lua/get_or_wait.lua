-- Reads a value and its version. If there is no value, marks that a process waits for its load.
-- KEYS[1] the value
-- KEYS[2] its version
-- KEYS[3] the mark of a waiting process
-- ARGV[1] TTL of the mark, ms
-- Returns {value or nil, version or nil}
local found = redis.call('MGET', KEYS[1], KEYS[2])
if not found[1] then
    redis.call('SET', KEYS[3], '1', 'PX', ARGV[1])
end
return found
