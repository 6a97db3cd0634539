-- In front of the scripts that need the time or set an end.

-- Microseconds since 1970 by the server's clock.
local function now_us()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- The key lives at least so long from now.
local function live(key, ms)
    if redis.call('PTTL', key) < tonumber(ms) then
        redis.call('PEXPIRE', key, ms)
    end
end

