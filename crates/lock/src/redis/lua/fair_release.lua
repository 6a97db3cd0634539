-- Removes a lease or a queue entry of the fair lock. If the lock is free then, notifies the first waiter in the queue.
-- KEYS[1] the lock
-- KEYS[3] the queue
-- KEYS[4] the expiry of the queue entries
-- ARGV[1] lease id
-- ARGV[2] channel on which waiters are notified: the lease id of the first one, and the ms until its queue entry expires
-- Returns 'freed', 'held', 'not_held' or 'other'; 'left' if it was a queue entry
local left = redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
local outcome = release(KEYS[1], ARGV[1])
if outcome == 'freed' or (left == 1 and outcome == 'not_held') then
    local now_ms = math.floor(now_us() / 1000)
    local first, alive_until = first_alive(KEYS[3], KEYS[4], now_ms)
    if first then
        redis.pcall('PUBLISH', ARGV[2], first .. ' ' .. string.format('%.0f', alive_until - now_ms))
    end
end
return left == 1 and 'left' or outcome
