-- Deletes a sale that is over, with all its keys, once its outbox is empty.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] its outbox: a stream
-- KEYS[4] in a sale in which nobody may buy again: a hash of user to an order that has ended
-- ARGV[1] the epoch that the caller knows
-- Returns 1 if it is gone; 0 if its outbox is not empty, or it has another incarnation or epoch
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch')
if not sale[1] then
    return 1
end
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or redis.call('XLEN', KEYS[3]) > 0 then
    return 0
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 1
