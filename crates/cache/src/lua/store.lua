-- Stores a loaded value, unless the key was changed since its version was read: then the loaded value may be outdated.
-- KEYS[1] the value
-- KEYS[2] its version
-- KEYS[3] the mark of a waiting process
-- ARGV[1] the version from before the load; empty if there was none
-- ARGV[2] the value
-- ARGV[3] TTL of the value, ms
-- ARGV[4] channel for ended loads
-- ARGV[5] the message
-- Returns 1 if stored; 0 otherwise
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if redis.call('DEL', KEYS[3]) == 1 then
    redis.pcall('PUBLISH', ARGV[4], ARGV[5])
end
return 1
