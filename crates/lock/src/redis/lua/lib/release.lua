-- Included by scripts that release a lock.

-- Removes a lease. Returns 'freed' if it was the last one, 'held' if the owner has others, 'not_held' if the lock is free, 'other' if
-- another owner holds it.
local function release(lock, id)
    if redis.call('HDEL', lock, 'lease:' .. id) == 0 then
        return redis.call('EXISTS', lock) == 1 and 'other' or 'not_held'
    end
    -- Besides the leases the hash has the owner and the fence.
    if redis.call('HLEN', lock) > 2 then
        return 'held'
    end
    redis.call('DEL', lock)
    return 'freed'
end

