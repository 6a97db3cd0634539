-- Closes a sale for a rebuild, so that no call of an older incarnation changes it any more. Keys of another type than the gate writes are
-- deleted: what they held is lost.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] its outbox: a stream
-- ARGV[1] the sale's epoch in the ledger, for a sale that is missing
-- Returns 1 if it was closed; 0 if a newer incarnation has it
local function delete_unless(key, expected)
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= expected then
        redis.call('DEL', key)
    end
end
delete_unless(KEYS[1], 'hash')
delete_unless(KEYS[2], 'hash')
delete_unless(KEYS[3], 'stream')
local incarnation = redis.call('HGET', KEYS[1], 'inc')
if incarnation and tonumber(incarnation) > tonumber(INCARNATION) then
    return 0
end
if not tonumber(redis.call('HGET', KEYS[1], 'epoch')) then
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
redis.call('HSET', KEYS[1], 'inc', INCARNATION, 'state', 'closed')
return 1
