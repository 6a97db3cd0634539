-- Included by scripts that use the queue of a fair lock.

-- The first waiter in the queue whose entry has not expired, and when it expires (ms). Removes expired entries.
local function first_alive(queue, alive, now_ms)
    for _, expired in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now_ms)) do
        redis.call('ZREM', queue, expired)
        redis.call('ZREM', alive, expired)
    end
    while true do
        local first = redis.call('ZRANGE', queue, 0, 0)[1]
        if not first then
            return nil, 0
        end
        local alive_until = redis.call('ZSCORE', alive, first)
        if alive_until then
            return first, tonumber(alive_until)
        end
        -- Without an expiry (the set may have been evicted) the entry could block forever. A live waiter queues again.
        redis.call('ZREM', queue, first)
    end
end

