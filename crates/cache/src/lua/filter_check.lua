-- Checks whether a key can exist.
-- KEYS[1] metadata of the filter: a hash
-- KEYS[2] the bits of the current generation
-- ARGV[1] id of the current generation as the caller knows it
-- ARGV[2] the position of the marker bit
-- ARGV[3…] positions
-- Returns 1 if it may exist; 0 if it does not; -1 if the caller's view of the filter is outdated
if redis.call('HGET', KEYS[1], 'current') ~= ARGV[1] or redis.call('GETBIT', KEYS[2], ARGV[2]) == 0 then
    return -1
end
for at = 3, #ARGV do
    if redis.call('GETBIT', KEYS[2], ARGV[at]) == 0 then
        return 0
    end
end
return 1
