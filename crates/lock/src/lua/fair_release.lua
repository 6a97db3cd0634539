-- Gives back a hold or a place in the line, whichever it is. If the lock is free then, the first in line is told by its name.
-- KEYS[1] the lock
-- KEYS[3] the line
-- KEYS[4] the living
-- ARGV[1] hold
-- ARGV[2] channel on which the waiting are told: the first in line, and for how many ms it counts as alive
-- Returns 'freed', 'held', 'gone' or 'other'; 'left' if it was a place in the line
local left = redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
local outcome = give_back(KEYS[1], ARGV[1])
if outcome == 'freed' or (left == 1 and outcome == 'gone') then
    local now_ms = math.floor(now_us() / 1000)
    local first, alive_until = first_alive(KEYS[3], KEYS[4], now_ms)
    if first then
        redis.pcall('PUBLISH', ARGV[2], first .. ' ' .. string.format('%.0f', alive_until - now_ms))
    end
end
return left == 1 and 'left' or outcome
