-- One reader less; the last one frees the lock for a writer.
-- KEYS[1] the writer
-- KEYS[3] the readers
-- ARGV[1] hold
-- ARGV[2] channel on which the waiting are told: nothing, or how many ms the last reader's lease lasts
-- Returns 'freed', 'held' (others read or this owner writes), 'gone' or 'other' (somebody writes)
local left = redis.call('ZREM', KEYS[3], ARGV[1])
local written = redis.call('EXISTS', KEYS[1]) == 1
if left == 0 then
    return written and 'other' or 'gone'
end
local now_ms = math.floor(now_us() / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
if written then
    return 'held'
end
local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
-- A writer may have been told of a lease that is over now.
redis.pcall('PUBLISH', ARGV[2], last and string.format('%.0f', last - now_ms) or '')
return last and 'held' or 'freed'
