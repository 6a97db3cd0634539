-- Included by scripts that need the time or set an expiry.

-- Microseconds since 1970 by the clock of the server.
local function now_us()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- Extends the TTL of the key to at least this time.
local function extend_ttl(key, ms)
    if redis.call('PTTL', key) < tonumber(ms) then
        redis.call('PEXPIRE', key, ms)
    end
end

