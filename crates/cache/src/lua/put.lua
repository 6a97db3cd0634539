-- Puts a value in the place of whatever is there, or is being loaded now; unless the key was changed by another since its version was
-- read: then it is unknown which of the two values is newer in the source, and the key is declared gone.
-- KEYS[1] the value
-- KEYS[2] its version
-- ARGV[1] the new version
-- ARGV[2] how long the version is kept, ms: longer than any load takes
-- ARGV[3] channel on which all processes are told that what they have is gone
-- ARGV[4] the message
-- ARGV[5] the version as it was before the change; nothing if there was none
-- ARGV[6] the value
-- ARGV[7] how long it is kept, ms
-- Returns 1 put; 0 declared gone
local unchanged = (redis.call('GET', KEYS[2]) or '') == ARGV[5]
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if unchanged then
    redis.call('SET', KEYS[1], ARGV[6], 'PX', ARGV[7])
end
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return unchanged and 1 or 0
