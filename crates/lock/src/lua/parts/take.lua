-- In front of the scripts that take a lock, after the time.

-- The next fencing token: above the last one, and never below the server's time, so that it rises even if the last one was forgotten.
local function next_fence(key, memory_ms)
    local last = tonumber(redis.call('GET', key) or '0')
    local fence = string.format('%.0f', math.max(now_us(), last + 1))
    redis.call('SET', key, fence, 'PX', memory_ms)
    return fence
end

-- One more hold of an owner who holds the lock, or may have it now. Sent again, it changes nothing.
local function take(lock, fence_key, owner, hold, lease_ms, memory_ms)
    local fence = redis.call('HGET', lock, 'fence')
    if not fence then
        fence = next_fence(fence_key, memory_ms)
        redis.call('HSET', lock, 'owner', owner, 'fence', fence)
    end
    redis.call('HSET', lock, 'hold:' .. hold, 1)
    live(lock, lease_ms)
    return { 1, fence }
end

