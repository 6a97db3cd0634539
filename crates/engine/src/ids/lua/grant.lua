-- Grants numbers of a day's counter, and the second that may be used with them.
-- KEYS[1] the counter: a hash of series, server, from, second and used
-- ARGV[1] the day of the counter, in days since 2022-01-01 UTC
-- ARGV[2] how many numbers are wanted; 0 if only the second is
-- ARGV[3] the name of a series, if a new one begins
-- ARGV[4] the highest second that the caller has been granted
-- Returns {now, microseconds, from, series, last, count}: the time in seconds since 2022-01-01 UTC and its fraction, the first second and
-- the name of the series, the last granted number, and how many were granted; zeros from the third on if the counter is neither that of
-- today nor that of tomorrow. The caller may use `now` with the numbers of the series, if it is on the day of the counter and not before
-- `from`.
local EPOCH_S, DAY_S, LAST = 1640995200, 86400, 4294967295
local day, wanted, seen = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])

local time = redis.call('TIME')
local now = tonumber(time[1]) - EPOCH_S
local stored = redis.call('HMGET', KEYS[1], 'series', 'server', 'from', 'second', 'used')
local series, from, second = stored[1], tonumber(stored[3] or 0), tonumber(stored[4] or 0)
local used = tonumber(stored[5] or 0)
now = math.max(now, second) -- the clock may have gone back

local today = math.floor(now / DAY_S)
if day ~= today and day ~= today + 1 then
  return {now, tonumber(time[2]), 0, '0', 0, 0}
end

local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local server = run_id .. string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
if not series or stored[2] ~= server or (seen > second and seen >= from) then
  -- A server that was restarted or promoted may have the data of an earlier time, and so has one that knows less than the caller.
  series = ARGV[3]
  from = math.max(now, seen, day * DAY_S - 1) + 1
  redis.call('HSET', KEYS[1], 'series', series, 'server', server, 'from', from, 'used', used)
  redis.call('EXPIREAT', KEYS[1], EPOCH_S + (day + 3) * DAY_S)
end

if day == today and now >= from and now > second then
  redis.call('HSET', KEYS[1], 'second', now)
end
local count = math.min(wanted, LAST - used)
if count > 0 then
  redis.call('HSET', KEYS[1], 'used', used + count)
end
return {now, tonumber(time[2]), from, series, used + count, count}
