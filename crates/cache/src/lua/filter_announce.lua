-- Adds a key to every generation there is.
-- KEYS[1] what is known of the filter: a hash
-- KEYS[2…] the bits of the generations that the announcer knows: the current one, the one that is being filled, or both
-- ARGV[1] the current generation as the announcer knows it, or nothing
-- ARGV[2] the one that is being filled, or nothing
-- ARGV[3…] for each of the bits: how many positions, the position of the bit that says that they are whole, the positions
-- Returns 1 added; -1 the announcer does not know the filter
if (redis.call('HGET', KEYS[1], 'current') or '') ~= ARGV[1] or (redis.call('HGET', KEYS[1], 'filling') or '') ~= ARGV[2] then
    return -1
end
local at = 3
for bits = 2, #KEYS do
    local positions = tonumber(ARGV[at])
    -- Those that are not whole are not asked any more.
    if redis.call('GETBIT', KEYS[bits], ARGV[at + 1]) == 1 then
        for position = at + 2, at + 1 + positions do
            redis.call('SETBIT', KEYS[bits], ARGV[position], 1)
        end
    end
    at = at + 2 + positions
end
return 1
