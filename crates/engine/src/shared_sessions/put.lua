-- Copies a session, unless it has ended. While the sessions of its user are revoked there is no copy: the ledger decides.
-- KEYS[1] the copy
-- KEYS[2] the end of the session
-- KEYS[3] the revocation of all sessions of its user
-- ARGV[1] the copy's text
-- ARGV[2] how long it is kept, in ms
-- Returns 0 if the session has ended, otherwise 1
if redis.call('EXISTS', KEYS[2]) == 1 then
    return 0
end
if redis.call('EXISTS', KEYS[3]) == 0 then
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
