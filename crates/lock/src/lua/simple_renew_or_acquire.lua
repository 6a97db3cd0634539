-- The simple lock as one of a red lock's: renewed, or acquired if the server has forgotten it.
-- KEYS[1] the lock
-- ARGV[1] hold
-- ARGV[2] lease, ms
-- Returns 1 renewed; 2 acquired, because nobody held it; 0 another holds it
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return holder and 1 or 2
