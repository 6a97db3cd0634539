-- The simple lock: nobody has it, or this very hold has it already.
-- KEYS[1] the lock: a string, the hold
-- ARGV[2] hold
-- ARGV[3] lease, ms
-- Returns {1, ''} held; {0, ms} what is left of the other's lease
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[2] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return { 1, '' }
