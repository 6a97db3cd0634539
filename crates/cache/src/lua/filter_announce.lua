-- Adds a key to every generation there is.
-- KEYS[1] what is known of the filter: a hash
-- KEYS[2…] the bits of the generations that the announcer knows: the current one, the one that is being filled, or both
-- ARGV[1] the current generation as the announcer knows it, or nothing
-- ARGV[2] the one that is being filled, or nothing
-- ARGV[3] how many positions belong to each
-- ARGV[4] the position of the bit that says that the bits are whole
-- ARGV[5…] positions, of the first bits and then of the second
-- Returns 1 added; -1 the announcer does not know the filter
if (redis.call('HGET', KEYS[1], 'current') or '') ~= ARGV[1] or (redis.call('HGET', KEYS[1], 'filling') or '') ~= ARGV[2] then
    return -1
end
local each = tonumber(ARGV[3])
for bits = 2, #KEYS do
    -- Those that are not whole are not asked any more.
    if redis.call('GETBIT', KEYS[bits], ARGV[4]) == 1 then
        for at = 1, each do
            redis.call('SETBIT', KEYS[bits], ARGV[4 + (bits - 2) * each + at], 1)
        end
    end
end
return 1
