-- The re-entrant lock: nobody has it, or this owner has it already.
-- KEYS[1] the lock: a hash of owner, fence and hold:… for every hold
-- KEYS[2] the last fence
-- ARGV[1] owner
-- ARGV[2] hold
-- ARGV[3] lease, ms
-- ARGV[4] memory of the fence, ms
-- Returns {1, fence} held; {0, ms} what is left of the other's lease
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
return take(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
