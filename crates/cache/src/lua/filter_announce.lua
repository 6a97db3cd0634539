-- Adds a key to every generation of the filter.
-- KEYS[1] metadata of the filter: a hash
-- KEYS[2…] the bits of the generations that the caller knows: the current one, the one being built, or both
-- ARGV[1] id of the current generation as the caller knows it, or empty
-- ARGV[2] id of the generation being built, or empty
-- ARGV[3…] for each of the bits: the number of positions, the position of the marker bit, the positions
-- Returns 1 if added; -1 if the caller's view of the filter is outdated
if (redis.call('HGET', KEYS[1], 'current') or '') ~= ARGV[1] or (redis.call('HGET', KEYS[1], 'building') or '') ~= ARGV[2] then
    return -1
end
local at = 3
for bits = 2, #KEYS do
    local positions = tonumber(ARGV[at])
    -- Bits without their marker were lost and are not used any more.
    if redis.call('GETBIT', KEYS[bits], ARGV[at + 1]) == 1 then
        for position = at + 2, at + 1 + positions do
            redis.call('SETBIT', KEYS[bits], ARGV[position], 1)
        end
    end
    at = at + 2 + positions
end
return 1
