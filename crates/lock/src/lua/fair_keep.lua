-- A sign of life of somebody who waits in line.
-- KEYS[4] the living
-- KEYS[3] the line
-- ARGV[1] hold
-- ARGV[2] how long the place lasts from now, ms
-- Returns 1 kept; 0 the place is gone
if not redis.call('ZSCORE', KEYS[4], ARGV[1]) then
    return 0
end
redis.call('ZADD', KEYS[4], string.format('%.0f', math.floor(now_us() / 1000) + ARGV[2]), ARGV[1])
live(KEYS[3], ARGV[2])
live(KEYS[4], ARGV[2])
return 1
