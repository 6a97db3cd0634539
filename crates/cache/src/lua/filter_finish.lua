-- Makes a generation that has been built the current one, unless another process has started to build another one.
-- KEYS[1] metadata of the filter: a hash
-- KEYS[2] the bits of the generation
-- KEYS[3] the bits of the previous current generation
-- ARGV[1] id of the generation
-- ARGV[2] its seed
-- ARGV[3] run id of the server on which it was built
-- ARGV[4] the position of the marker bit, which was set when the build started
-- Returns 1 if it is now current; 0 otherwise
if redis.call('HGET', KEYS[1], 'building') ~= ARGV[1] or redis.call('GETBIT', KEYS[2], ARGV[4]) == 0 then
    return 0
end
redis.call('HSET', KEYS[1], 'current', ARGV[1], 'seed', ARGV[2], 'run_id', ARGV[3], 'built_at', redis.call('TIME')[1])
redis.call('HDEL', KEYS[1], 'building', 'building_seed', 'building_run_id')
if KEYS[3] ~= KEYS[2] then
    redis.call('DEL', KEYS[3])
end
return 1
