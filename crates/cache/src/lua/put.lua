-- Puts a value in the place of whatever is there, or is being loaded now.
-- KEYS[1] the value
-- KEYS[2] its version
-- ARGV[1] the new version
-- ARGV[2] how long the version is kept, ms: longer than any load takes
-- ARGV[3] channel on which all processes are told that what they have is gone
-- ARGV[4] the message
-- ARGV[5] the value
-- ARGV[6] how long it is kept, ms
-- Returns 1
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[1], ARGV[5], 'PX', ARGV[6])
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return 1
