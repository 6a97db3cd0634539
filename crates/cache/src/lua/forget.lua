-- Declares a value gone, whatever is being loaded now.
-- KEYS[1] the value
-- KEYS[2] its version
-- ARGV[1] the new version
-- ARGV[2] how long the version is kept, ms: longer than any load takes
-- ARGV[3] channel on which all processes are told
-- ARGV[4] the message
-- Returns 1
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return 1
