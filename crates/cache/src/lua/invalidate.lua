-- Invalidates a value, and prevents loads in progress from storing theirs by replacing the version.
-- KEYS[1] the value
-- KEYS[2] its version
-- ARGV[1] the new version
-- ARGV[2] TTL of the version, ms; longer than any load takes
-- ARGV[3] channel for invalidations
-- ARGV[4] the message
-- Returns 1
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return 1
