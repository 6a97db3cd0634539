-- Renews a lease of the re-entrant, the fair or the write lock.
-- KEYS[1] the lock
-- ARGV[1] lease id
-- ARGV[2] TTL, ms
-- Returns 1 renewed; 0 no longer held
if redis.call('HEXISTS', KEYS[1], 'lease:' .. ARGV[1]) == 0 then
    return 0
end
extend_ttl(KEYS[1], ARGV[2])
return 1
