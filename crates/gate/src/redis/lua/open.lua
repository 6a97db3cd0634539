-- Opens a sale under a new epoch, with marks that were loaded under a key of their own. Loaded keys expire in case nobody opens the sale, and
-- keep that when they are renamed, so they are made permanent. There may be millions of old marks: a RENAME over them would stop Redis until all
-- are freed, while UNLINK frees them beside other commands.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] its outbox: a stream
-- KEYS[4] the loaded marks: a hash with the epoch under #epoch
-- KEYS[5] in a sale in which nobody may buy again: a hash of user to an order that has ended
-- KEYS[6] such orders as they were loaded: a hash with the epoch under #epoch
-- ARGV[1] the new epoch
-- ARGV[2] the number of loaded marks
-- ARGV[3] the version of the settings
-- ARGV[4] cap
-- ARGV[5] begin in ms
-- ARGV[6] end in ms
-- ARGV[7] state
-- ARGV[8] price in cents
-- ARGV[9] the consumer group of the outbox
-- ARGV[10] the channel on which nodes listen for changes
-- ARGV[11] the sale's id
-- ARGV[12] '0' if nobody may buy again in this sale
-- ARGV[13] the number of loaded orders that have ended
-- Returns 1 if it was opened; 0 if it was open under this epoch; -1 if a newer incarnation or a higher epoch has it, or something loaded is missing
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state')
if sale[1] and tonumber(sale[1]) > tonumber(INCARNATION) then
    return -1
end
if sale[1] == INCARNATION and sale[2] == ARGV[1] and sale[3] ~= 'closed' then
    return 0
end
if sale[2] and tonumber(sale[2]) >= tonumber(ARGV[1]) then
    return -1
end
local marks = redis.call('HLEN', KEYS[4]) - 1
if marks ~= tonumber(ARGV[2]) or redis.call('HGET', KEYS[4], '#epoch') ~= ARGV[1] then
    return -1
end
if ARGV[12] == '0' and (redis.call('HLEN', KEYS[6]) - 1 ~= tonumber(ARGV[13]) or redis.call('HGET', KEYS[6], '#epoch') ~= ARGV[1]) then
    return -1
end
redis.call('UNLINK', KEYS[2], KEYS[5])
redis.call('RENAME', KEYS[4], KEYS[2])
redis.call('PERSIST', KEYS[2])
if ARGV[12] == '0' then
    redis.call('RENAME', KEYS[6], KEYS[5])
    redis.call('PERSIST', KEYS[5])
end
redis.call('DEL', KEYS[3])
redis.call('XGROUP', 'CREATE', KEYS[3], ARGV[9], '0', 'MKSTREAM')
local cap = string.format('%.0f', math.max(tonumber(ARGV[4]), marks))
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'inc', INCARNATION, 'epoch', ARGV[1], 'ver', ARGV[3], 'cap', cap, 'begin', ARGV[5], 'end', ARGV[6], 'state', ARGV[7],
    'price', ARGV[8], 'again', ARGV[12], 'hw', '0', 'seq', '0', 'gen', '0', 'pending', '0')
redis.call('PUBLISH', ARGV[10], 'reset ' .. ARGV[11] .. ' ' .. ARGV[1] .. ' 0')
return 1
