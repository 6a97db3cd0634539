-- Reads the state of a sale.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order
-- KEYS[3] its outbox: a stream
-- KEYS[4] in a sale in which nobody may buy again: a hash of user to an order that has ended
-- ARGV[1] the epoch that the caller knows
-- Returns 'lost', or {version, state, begin, end, cap, generation, sequence number, number of marks, number of outbox entries, number of
-- orders in them, time in ms}
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state', 'ver', 'begin', 'end', 'cap', 'gen', 'seq', 'pending', 'hw', 'again')
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or sale[3] == 'closed' or redis.call('HGET', KEYS[2], '#epoch') ~= ARGV[1] then
    return 'lost'
end
if sale[12] == '0' and redis.call('HGET', KEYS[4], '#epoch') ~= ARGV[1] then
    return 'lost'
end
local time = redis.call('TIME')
local now = math.max(time[1] * 1000 + math.floor(time[2] / 1000), tonumber(sale[11]))
return {sale[4], sale[3], sale[5], sale[6], sale[7], sale[8], sale[9], redis.call('HLEN', KEYS[2]) - 1, redis.call('XLEN', KEYS[3]), sale[10],
    string.format('%.0f', now)}
