-- Closes a sale for a rebuild, so that no call of an older incarnation changes it any more, and no node opens it under an epoch that the
-- ledger had given it before. Keys of another type than the gate writes are
-- deleted: what they held is lost.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] its outbox: a stream
-- KEYS[4] in a sale in which nobody may buy again: a hash of user to an order that has ended
-- ARGV[1] the sale's epoch in the ledger
-- Returns 1 if it was closed; 0 if a newer incarnation has it, or this one has opened it under a higher epoch
local function delete_unless(key, expected)
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= expected then
        redis.call('DEL', key)
    end
end
delete_unless(KEYS[1], 'hash')
delete_unless(KEYS[2], 'hash')
delete_unless(KEYS[3], 'stream')
delete_unless(KEYS[4], 'hash')
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state')
if sale[1] and tonumber(sale[1]) > tonumber(INCARNATION) then
    return 0
end
local epoch = tonumber(sale[2])
if not epoch or epoch < tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
elseif epoch > tonumber(ARGV[1]) and sale[1] == INCARNATION and sale[3] ~= 'closed' then
    return 0
end
redis.call('HSET', KEYS[1], 'inc', INCARNATION, 'state', 'closed')
return 1
