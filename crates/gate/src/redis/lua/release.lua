-- Releases marks that still belong to their orders.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] in a sale in which nobody may buy again: a hash of user to an order that has ended
-- ARGV[1] the epoch that the caller knows
-- ARGV[2] the channel on which nodes listen for changes
-- ARGV[3] the sale's id
-- ARGV[4…] for each mark: user, order, the order that the mark is set to, or '', and '1' if the order was live and has ended
-- Returns 'lost', or 1 for each mark that was released and 0 for each that was not
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state', 'again')
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or sale[3] == 'closed' or redis.call('HGET', KEYS[2], '#epoch') ~= ARGV[1] then
    return 'lost'
end
if sale[4] == '0' and redis.call('HGET', KEYS[3], '#epoch') ~= ARGV[1] then
    return 'lost'
end
local released, changed = {}, false
for i = 4, #ARGV, 4 do
    local user, order, existing = ARGV[i], ARGV[i + 1], ARGV[i + 2]
    if sale[4] == '0' and ARGV[i + 3] == '1' then
        -- Also if the mark is gone: it may have been released by a caller that did not know why the order is dead.
        redis.call('HSET', KEYS[3], user, order)
    end
    if redis.call('HGET', KEYS[2], user) == order then
        if existing == '' then
            redis.call('HDEL', KEYS[2], user)
        else
            redis.call('HSET', KEYS[2], user, existing)
        end
        released[#released + 1], changed = 1, true
    else
        released[#released + 1] = 0
    end
end
if changed then
    local generation = redis.call('HINCRBY', KEYS[1], 'gen', 1)
    redis.call('PUBLISH', ARGV[2], 'reset ' .. ARGV[3] .. ' ' .. ARGV[1] .. ' ' .. generation)
end
return released
