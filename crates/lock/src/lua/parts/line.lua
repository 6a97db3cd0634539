-- In front of the scripts that serve the line of a fair lock.

-- The first in line who is alive, and until when (ms) without a sign of life.
local function first_alive(line, alive, now_ms)
    for _, dead in ipairs(redis.call('ZRANGEBYSCORE', alive, '-inf', now_ms)) do
        redis.call('ZREM', line, dead)
        redis.call('ZREM', alive, dead)
    end
    while true do
        local first = redis.call('ZRANGE', line, 0, 0)[1]
        if not first then
            return nil, 0
        end
        local alive_until = redis.call('ZSCORE', alive, first)
        if alive_until then
            return first, tonumber(alive_until)
        end
        -- Nobody knows whether it lives (the set may have been evicted): it will stand in line again.
        redis.call('ZREM', line, first)
    end
end

