-- Ends sessions, and tells all nodes.
-- KEYS[1…] the end of a session, or the revocation of all sessions of a user
-- ARGV[1] the channel of ended sessions
-- ARGV[2] how long the ends are kept, in ms
-- ARGV[3…] the message of each key
-- Returns the number of keys
for i = 1, #KEYS do
    redis.call('SET', KEYS[i], '1', 'PX', ARGV[2])
    redis.call('PUBLISH', ARGV[1], ARGV[i + 2])
end
return #KEYS
