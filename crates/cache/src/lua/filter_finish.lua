-- The filter is filled: from now on it is the current one, unless somebody else has begun to fill another.
-- KEYS[1] what is known of the filter: a hash
-- KEYS[2] its bits
-- KEYS[3] the bits that were current until now
-- ARGV[1] the generation
-- ARGV[2] its seed
-- ARGV[3] the run of the server in which it was filled
-- ARGV[4] the position of the bit that says that the bits are whole: it was set at the beginning
-- Returns 1 current; 0 not
if redis.call('HGET', KEYS[1], 'filling') ~= ARGV[1] or redis.call('GETBIT', KEYS[2], ARGV[4]) == 0 then
    return 0
end
redis.call('HSET', KEYS[1], 'current', ARGV[1], 'seed', ARGV[2], 'run', ARGV[3], 'since', redis.call('TIME')[1])
redis.call('HDEL', KEYS[1], 'filling', 'filling_seed', 'filling_run')
if KEYS[3] ~= KEYS[2] then
    redis.call('DEL', KEYS[3])
end
return 1
