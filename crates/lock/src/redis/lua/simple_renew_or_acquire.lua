-- Renews the simple lock as a member of a Redlock, or acquires it if the server does not have it.
-- KEYS[1] the lock
-- ARGV[1] lease id
-- ARGV[2] TTL, ms
-- Returns 1 renewed; 2 acquired, because it was free; 0 held by another lease
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return holder and 1 or 2
