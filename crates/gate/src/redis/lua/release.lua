-- Releases marks that still belong to their orders.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- ARGV[1] the epoch that the caller knows
-- ARGV[2] the channel on which nodes listen for changes
-- ARGV[3] the sale's id
-- ARGV[4…] for each mark: user, order, and the order that the mark is set to, or ''
-- Returns 'lost', or 1 for each mark that was released and 0 for each that was not
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state')
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or sale[3] == 'closed' or redis.call('HGET', KEYS[2], '#epoch') ~= ARGV[1] then
    return 'lost'
end
local released, changed = {}, false
for i = 4, #ARGV, 3 do
    local user, order, existing = ARGV[i], ARGV[i + 1], ARGV[i + 2]
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
