-- One reader less; the last one frees the lock for a writer.
-- KEYS[1] the writer
-- KEYS[3] the readers
-- ARGV[1] hold
-- ARGV[2] channel on which the waiting are told
-- Returns 'freed', 'held' (others read or this owner writes), 'gone' or 'other' (somebody writes)
local left = redis.call('ZREM', KEYS[3], ARGV[1])
local written = redis.call('EXISTS', KEYS[1]) == 1
if left == 0 then
    return written and 'other' or 'gone'
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', math.floor(now_us() / 1000))
if written or redis.call('EXISTS', KEYS[3]) == 1 then
    return 'held'
end
redis.call('PUBLISH', ARGV[2], '')
return 'freed'
