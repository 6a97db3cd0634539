-- Included, after time.lua, by scripts that acquire a lock.

-- The next fencing token: above the last one, and never below the time of the server, so that it increases even if the last one was lost.
local function next_fence(key, memory_ms)
    local last = tonumber(redis.call('GET', key) or '0')
    local fence = string.format('%.0f', math.max(now_us(), last + 1))
    redis.call('SET', key, fence, 'PX', memory_ms)
    return fence
end

-- Adds a lease for an owner that holds the lock or may acquire it now. Idempotent.
local function acquire(lock, fence_key, owner, id, ttl_ms, memory_ms)
    local fence = redis.call('HGET', lock, 'fence')
    if not fence then
        fence = next_fence(fence_key, memory_ms)
        redis.call('HSET', lock, 'owner', owner, 'fence', fence)
    end
    redis.call('HSET', lock, 'lease:' .. id, 1)
    extend_ttl(lock, ttl_ms)
    return { 1, fence }
end

