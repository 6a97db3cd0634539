-- Checks requests against sliding windows and counts those that pass, or reverts counted requests.
-- KEYS[1…] the counters of all requests, in their order; one counter may be in several requests. A counter is a string of the number of a
-- window since 1970, the count of that window, and the count of the window before
-- ARGV[1…] for each request: its kind, the number of its counters, and for each of these the maximum count, the window in microseconds,
-- and how many earlier requests to count first (only of the kind 'each').
-- The kind is 'each' (a counter counts the request if it passes there and at all counters before), 'all' (all counters count it, or none)
-- or 'undo' (all counters revert it)
-- Returns for each request 0, or if it is refused {the place of the counter that refuses it, from 0, the wait in microseconds, and the
-- counter: window, count of that window, count of the window before}
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local values = #KEYS > 0 and redis.call('MGET', unpack(KEYS)) or {}

local counters = {}
local function counter(place, span)
    local found = counters[KEYS[place]]
    if found then
        return found
    end
    local window = math.floor(now / span)
    found = {span = span, window = window, elapsed = now / span - window, current = 0, previous = 0}
    local at, current, previous = string.match(values[place] or '', '^(%d+) (%d+) (%d+)$')
    if at and tonumber(at) >= window then
        -- A later window means that the clock was set back: the counts are kept.
        found.current, found.previous = tonumber(current), tonumber(previous)
    elseif at and tonumber(at) == window - 1 then
        found.previous = tonumber(current)
    end
    counters[KEYS[place]] = found
    return found
end

local function wait(c, maximum)
    -- The same arithmetic as in sliding_window.rs. nil: one more request is within the limit.
    if c.current + c.previous * (1 - c.elapsed) + 1 <= maximum then
        return nil
    end
    local windows = 1 - c.elapsed
    if c.current + 1 <= maximum and c.previous > 0 then
        windows = 1 - (maximum - c.current - 1) / c.previous - c.elapsed
    elseif c.current > 0 and maximum >= 1 then
        windows = 1 - c.elapsed + 1 - (maximum - 1) / c.current
    end
    return math.max(math.ceil(windows * c.span), 1000)
end

local function undo(c)
    -- The request may have been counted in the previous window.
    if c.current > 0 then
        c.current, c.changed = c.current - 1, true
    elseif c.previous > 0 then
        c.previous, c.changed = c.previous - 1, true
    end
end

local function count(c, number)
    c.current, c.changed = c.current + number, true
end

local replies = {}
local key, arg = 1, 1
while arg < #ARGV do
    local kind, number = ARGV[arg], tonumber(ARGV[arg + 1])
    local reply = 0
    for place = 0, number - 1 do
        local earlier = tonumber(ARGV[arg + 4 + 3 * place])
        if earlier > 0 then
            count(counter(key + place, tonumber(ARGV[arg + 3 + 3 * place])), earlier)
        end
    end
    for place = 0, number - 1 do
        local maximum, span = tonumber(ARGV[arg + 2 + 3 * place]), tonumber(ARGV[arg + 3 + 3 * place])
        local c = counter(key + place, span)
        if kind == 'undo' then
            undo(c)
        else
            local refused = wait(c, maximum)
            if refused then
                reply = {place, refused, c.window, c.current, c.previous}
                break
            end
            if kind == 'each' then
                count(c, 1)
            end
        end
    end
    if kind == 'all' and reply == 0 then
        for place = 0, number - 1 do
            count(counters[KEYS[key + place]], 1)
        end
    end
    replies[#replies + 1] = reply
    key, arg = key + number, arg + 2 + 3 * number
end

for name, c in pairs(counters) do
    if c.changed then
        -- Counted until the end of the next window.
        local ttl_ms = math.ceil(((c.window + 2) * c.span - now) / 1000)
        redis.call('SET', name, string.format('%.0f %.0f %.0f', c.window, c.current, c.previous), 'PX', ttl_ms)
    end
end
return replies
