-- Applies newer settings of a sale. The cap is never set below the number of marks.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- ARGV[1] the epoch that the caller knows
-- ARGV[2] the version of the settings
-- ARGV[3] cap
-- ARGV[4] begin in ms
-- ARGV[5] end in ms
-- ARGV[6] state
-- ARGV[7] the channel on which nodes listen for changes
-- ARGV[8] the sale's id
-- Returns 'lost', or the cap
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state', 'ver', 'cap')
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or sale[3] == 'closed' or redis.call('HGET', KEYS[2], '#epoch') ~= ARGV[1] then
    return 'lost'
end
if tonumber(ARGV[2]) <= tonumber(sale[4]) then
    return sale[5]
end
local cap = string.format('%.0f', math.max(tonumber(ARGV[3]), redis.call('HLEN', KEYS[2]) - 1))
redis.call('HSET', KEYS[1], 'ver', ARGV[2], 'cap', cap, 'begin', ARGV[4], 'end', ARGV[5], 'state', ARGV[6])
local generation = redis.call('HINCRBY', KEYS[1], 'gen', 1)
redis.call('PUBLISH', ARGV[7], 'reset ' .. ARGV[8] .. ' ' .. ARGV[1] .. ' ' .. generation)
return cap
