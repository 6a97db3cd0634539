-- The read lock: nobody writes but perhaps this owner.
-- KEYS[1] the writer: a hash of owner, fence and hold:… for every hold
-- KEYS[2] the last fence
-- KEYS[3] the readers: a sorted set of holds (owner:…) by the end of their leases, ms
-- ARGV[1] owner
-- ARGV[2] hold
-- ARGV[3] lease, ms
-- ARGV[4] memory of the fence, ms
-- Returns {1, fence} held; {0, ms} what is left of the writer's lease
local writer = redis.call('HGET', KEYS[1], 'owner')
if writer and writer ~= ARGV[1] then
    return { 0, redis.call('PTTL', KEYS[1]) }
end
-- Who writes reads with the token of its writing.
local fence = writer and redis.call('HGET', KEYS[1], 'fence') or next_fence(KEYS[2], ARGV[4])
local now_ms = math.floor(now_us() / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
redis.call('ZADD', KEYS[3], string.format('%.0f', now_ms + ARGV[3]), ARGV[2])
live(KEYS[3], ARGV[3])
return { 1, fence }
