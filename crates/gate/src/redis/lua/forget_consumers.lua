-- Deletes the names of consumers that have read nothing for a long time and have nothing left to settle: their processes are gone. One
-- that is deleted by mistake is created again when it reads.
-- KEYS[1] the outbox: a stream
-- ARGV[1] the consumer group
-- ARGV[2] for how long they have read nothing, in ms
-- Returns how many were deleted
if redis.call('EXISTS', KEYS[1]) == 0 then
    return 0
end
local deleted = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local is = {}
    for i = 1, #consumer, 2 do
        is[consumer[i]] = consumer[i + 1]
    end
    if is['pending'] == 0 and is['idle'] > tonumber(ARGV[2]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], is['name'])
        deleted = deleted + 1
    end
end
return deleted
