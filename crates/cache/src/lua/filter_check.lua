-- KEYS[1] what is known of the filter: a hash
-- KEYS[2] the bits of the current generation
-- ARGV[1] the generation that the asker knows as current
-- ARGV[2] the position of the bit that says that the bits are whole
-- ARGV[3…] positions
-- Returns 1 may exist; 0 does not; -1 the asker does not know the filter
if redis.call('HGET', KEYS[1], 'current') ~= ARGV[1] or redis.call('GETBIT', KEYS[2], ARGV[2]) == 0 then
    return -1
end
for at = 3, #ARGV do
    if redis.call('GETBIT', KEYS[2], ARGV[at]) == 0 then
        return 0
    end
end
return 1
