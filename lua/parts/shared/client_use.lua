--[[
shared/client_use: counts the requests in flight and the used tokens of a client whose key has limits.

Guarantee: a request is in flight while it has an open lease or a ticket in the queue, and for no longer than the
expiry of these, whatever becomes of its replica; the record of these requests expires with the last of them. Used
tokens are paid back continuously at the rate of the limit; their record expires when all are paid back and no request
of the client was decided, renewed or ended for two minutes.
Takes the key prefix, the id of a reservation (with the client's tag at its end), and the server's time in ms. Returns a
table of the functions below. Only for ids that have a tag.
--]]
local call, exact = redis.call, function(number) return string.format("%.0f", number) end
local USED = ">ddI4" -- format of a record of tokens: used, time (ms), tokens per minute
local RATE_KEPT_MS = 120000 -- least lifetime of a record of tokens: a request's end needs its rate (renewed every 10 s)

return function(prefix, id, now)
  local tag, client = id:sub(CLIENT_AT), {}
  local open, tokens = prefix .. "client:" .. tag, prefix .. "tokens:" .. tag

  function client.in_flight()
    call("ZREMRANGEBYSCORE", open, "-inf", exact(now))
    return call("ZCARD", open)
  end
  function client.counts() return (tonumber(call("ZSCORE", open, id)) or 0) > now end
  function client.hold(expires_ms)
    call("ZADD", open, exact(expires_ms), id)
    local last_ms = call("ZREVRANGE", open, 0, 0, "WITHSCORES")[2]
    call("EXPIRE", open, math.ceil((last_ms - now) / 1000)) -- only a call removes old members, so the set expires, too
  end
  function client.let_go() return call("ZREM", open, id) == 1 end

  local function write(used, at, rate)
    local life_ms = math.max(RATE_KEPT_MS, math.ceil(used * MINUTE_MS / rate))
    call("SET", tokens, struct.pack(USED, used, at, rate), "PX", exact(life_ms))
  end

  -- Count more or fewer tokens as used; 0 only reads. per_minute: the rate from now on; nil: as before. Returns the
  -- tokens that are used and not paid back.
  function client.spend(more, per_minute)
    local used, at, rate, record = 0, now, per_minute, call("GET", tokens)
    if record then used, at, rate = struct.unpack(USED, record) end
    if not rate then return 0 end
    used = math.max(0, used - math.max(0, now - at) * rate / MINUTE_MS)
    if more == 0 then return used end
    used = math.max(0, used + more)
    write(used, now, per_minute or rate)
    return used
  end

  -- Extend the request's count as in flight, and the life of the record, whose rate the request's end will need.
  function client.renew(expires_ms)
    client.hold(expires_ms)
    local record = call("GET", tokens)
    if record then
      local used, at, rate = struct.unpack(USED, record)
      write(used, at, rate)
    end
  end

  return client
end
