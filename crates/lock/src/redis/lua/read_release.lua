-- Removes a reader; the last one frees the lock for a writer. While other readers remain, waiters are notified too: a waiting writer may
-- know only the expiry of a lease that is gone now.
-- KEYS[1] the write lock
-- KEYS[3] the readers
-- ARGV[1] lease id
-- ARGV[2] channel on which waiters are notified: an empty message, or the ms until the lease of the last reader expires
-- Returns 'freed', 'held' (other readers, or this owner writes), 'not_held' or 'other' (another owner writes)
local removed = redis.call('ZREM', KEYS[3], ARGV[1])
local written = redis.call('EXISTS', KEYS[1]) == 1
if removed == 0 then
    return written and 'other' or 'not_held'
end
local now_ms = math.floor(now_us() / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now_ms)
if written then
    return 'held'
end
local last = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
redis.pcall('PUBLISH', ARGV[2], last and string.format('%.0f', last - now_ms) or '')
return last and 'held' or 'freed'
