-- In front of the scripts that give a lock back.

-- One hold less. 'freed' if it was the last, 'held' if the owner has others, 'gone' if nobody holds the lock, 'other' if somebody else does.
local function give_back(lock, hold)
    if redis.call('HDEL', lock, 'hold:' .. hold) == 0 then
        return redis.call('EXISTS', lock) == 1 and 'other' or 'gone'
    end
    -- Beside the holds there are the owner and the fence.
    if redis.call('HLEN', lock) > 2 then
        return 'held'
    end
    redis.call('DEL', lock)
    return 'freed'
end

