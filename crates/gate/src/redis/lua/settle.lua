-- Removes outbox entries whose orders the ledger has.
-- KEYS[1] the sale: a hash
-- KEYS[2] its outbox: a stream
-- ARGV[1] the consumer group
-- ARGV[2] the channel on which nodes wait for recorded orders, or ''
-- ARGV[3] the sale's id
-- ARGV[4…] ids of entries
-- Returns the number of orders in the entries that were removed
local orders = 0
for i = 4, #ARGV do
    local found = redis.call('XRANGE', KEYS[2], ARGV[i], ARGV[i])
    if found[1] then
        redis.call('XACK', KEYS[2], ARGV[1], ARGV[i])
        redis.call('XDEL', KEYS[2], ARGV[i])
        -- An entry that cannot be read may have any number of fields.
        orders = orders + math.max(0, math.floor((#found[1][2] - 4) / 2))
    end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
    -- Only where the sale exists: a counter alone must not create it.
    if redis.call('XLEN', KEYS[2]) == 0 then
        -- Also after an entry that could not be read, whose number of orders is not known.
        redis.call('HSET', KEYS[1], 'pending', '0')
    elseif orders > 0 then
        redis.call('HINCRBY', KEYS[1], 'pending', -orders)
    end
end
if orders > 0 and ARGV[2] ~= '' then
    redis.call('PUBLISH', ARGV[2], 'recorded ' .. ARGV[3])
end
return orders
