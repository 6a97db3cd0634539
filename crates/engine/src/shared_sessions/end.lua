-- Ends sessions, and tells all nodes.
-- KEYS[1…] the sessions
-- ARGV[1] the channel of ended sessions
-- ARGV[2] how long the end is kept, in ms
-- ARGV[3…] the message of each session
-- Returns the number of sessions
for i = 1, #KEYS do
    redis.call('SET', KEYS[i], 'ended', 'PX', ARGV[2])
    redis.call('PUBLISH', ARGV[1], ARGV[i + 2])
end
return #KEYS
