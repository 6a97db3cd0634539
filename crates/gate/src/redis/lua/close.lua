-- Closes a sale for a rebuild, so that no call of an older incarnation changes it any more.
-- KEYS[1] the sale: a hash
-- ARGV[1] the sale's epoch in the ledger, for a sale that is missing
-- Returns 1 if it was closed; 0 if a newer incarnation has it
local incarnation = redis.call('HGET', KEYS[1], 'inc')
if incarnation and tonumber(incarnation) > tonumber(INCARNATION) then
    return 0
end
if not incarnation then
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
end
redis.call('HSET', KEYS[1], 'inc', INCARNATION, 'state', 'closed')
return 1
