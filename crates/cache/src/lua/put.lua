-- Replaces a value, and prevents loads in progress from storing theirs. If another change of the key has happened since its version was
-- read, it is unknown which of the two values is newer in the source, and the key is only invalidated.
-- KEYS[1] the value
-- KEYS[2] its version
-- ARGV[1] the new version
-- ARGV[2] TTL of the version, ms; longer than any load takes
-- ARGV[3] channel for invalidations
-- ARGV[4] the message
-- ARGV[5] the version from before the change; empty if there was none
-- ARGV[6] the value
-- ARGV[7] TTL of the value, ms
-- Returns 1 if stored; 0 if only invalidated
local unchanged = (redis.call('GET', KEYS[2]) or '') == ARGV[5]
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if unchanged then
    redis.call('SET', KEYS[1], ARGV[6], 'PX', ARGV[7])
end
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return unchanged and 1 or 0
