-- Stores what was loaded, unless the value was declared gone since its version was read: then what was loaded may be old.
-- KEYS[1] the value
-- KEYS[2] its version
-- KEYS[3] that a process waits for its load
-- ARGV[1] the version as it was before the load; nothing if there was none
-- ARGV[2] the value
-- ARGV[3] how long it is kept, ms
-- ARGV[4] channel for loads that have ended
-- ARGV[5] the message
-- Returns 1 stored; 0 not
if (redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
if redis.call('DEL', KEYS[3]) == 1 then
    redis.pcall('PUBLISH', ARGV[4], ARGV[5])
end
return 1
