-- Writes and publishes, to find out whether Redis lets this node do so.
-- KEYS[1] a key that nothing reads
-- ARGV[1] how long it is kept, in ms
-- ARGV[2] a channel that nothing listens to
-- Returns 1
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
redis.call('PUBLISH', ARGV[2], '')
return 1
