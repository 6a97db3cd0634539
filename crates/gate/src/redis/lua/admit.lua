-- Decides on requests to buy, and appends the new orders to the outbox in the same step.
-- KEYS[1] the sale: a hash
-- KEYS[2] its marks: a hash of user to order, with the epoch under #epoch
-- KEYS[3] its outbox: a stream
-- KEYS[4] in a sale in which nobody may buy again: a hash of user to an order that has ended, with the epoch under #epoch
-- ARGV[1] the epoch that the caller knows
-- ARGV[2] the highest sequence number that the caller has seen
-- ARGV[3] the most entries in the outbox
-- ARGV[4] the channel on which nodes listen for changes
-- ARGV[5] the sale's id
-- ARGV[6…] for each request: user, order
-- Returns 'lost', or {time in ms, generation, price, sequence number before this call, what is left after it, id of the new entry or '', one
-- answer per request}:
-- 'a' admitted now, 'r' admitted before, 'h' and the order that the user has or may not replace, 'b' busy, or a refusal: 's' sold out, 'n' not started,
-- 'e' ended, 'p' paused, 'd' draft
local sale = redis.call('HMGET', KEYS[1], 'inc', 'epoch', 'state', 'cap', 'begin', 'end', 'hw', 'seq', 'gen', 'price', 'again')
local seq = tonumber(sale[8])
if sale[1] ~= INCARNATION or sale[2] ~= ARGV[1] or sale[3] == 'closed' or seq < tonumber(ARGV[2]) then
    return 'lost'
end

local fields = {'#epoch'}
for i = 6, #ARGV, 2 do
    fields[#fields + 1] = ARGV[i]
end
local marks = redis.call('HMGET', KEYS[2], unpack(fields))
if marks[1] ~= ARGV[1] then
    return 'lost'
end
local ended = {}
if sale[11] == '0' then
    ended = redis.call('HMGET', KEYS[4], unpack(fields))
    if ended[1] ~= ARGV[1] then
        return 'lost'
    end
end

local time = redis.call('TIME')
local now = math.max(time[1] * 1000 + math.floor(time[2] / 1000), tonumber(sale[7]))
local refusal
if sale[3] == 'draft' then
    refusal = 'd'
elseif sale[3] == 'ended' or now >= tonumber(sale[6]) then
    refusal = 'e'
elseif sale[3] == 'paused' then
    refusal = 'p'
elseif now < tonumber(sale[5]) then
    refusal = 'n'
elseif redis.call('XLEN', KEYS[3]) >= tonumber(ARGV[3]) then
    refusal = 'b'
end

local left = tonumber(sale[4]) - (redis.call('HLEN', KEYS[2]) - 1)
local answers, new, taken = {}, {}, {}
for i = 6, #ARGV, 2 do
    local user, order = ARGV[i], ARGV[i + 1]
    local held = marks[i / 2 - 1] or taken[user]
    if held and refusal ~= 'd' then
        answers[#answers + 1] = held == order and 'r' or 'h' .. held
    elseif ended[i / 2 - 1] and refusal ~= 'd' then
        answers[#answers + 1] = 'h' .. ended[i / 2 - 1]
    elseif refusal then
        answers[#answers + 1] = refusal
    elseif left <= 0 then
        answers[#answers + 1] = 's'
    else
        left = left - 1
        taken[user] = order
        new[#new + 1] = user
        new[#new + 1] = order
        answers[#answers + 1] = 'a'
    end
end

local entry = ''
if #new > 0 then
    -- Scripts are not rolled back, so everything was checked before the first write. The outbox comes first, because it is the
    -- write that can be refused.
    local last = seq + #new / 2
    entry = sale[2] .. '-' .. string.format('%.0f', last)
    if not redis.call('XADD', KEYS[3], 'NOMKSTREAM', entry, 'first', string.format('%.0f', seq + 1), 'at', string.format('%.0f', now), unpack(new)) then
        return 'lost'
    end
    redis.call('HSET', KEYS[2], unpack(new))
    redis.call('HSET', KEYS[1], 'seq', string.format('%.0f', last), 'hw', string.format('%.0f', now))
    redis.call('HINCRBY', KEYS[1], 'pending', #new / 2)
    if left == 0 then
        redis.call('PUBLISH', ARGV[4], 'soldout ' .. ARGV[5] .. ' ' .. ARGV[1] .. ' ' .. sale[9])
    end
end
return {string.format('%.0f', now), sale[9], sale[10], sale[8], string.format('%.0f', math.max(left, 0)), entry, answers}
