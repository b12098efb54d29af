--[[
shared/resync: a worker's index is no longer its engine's table: why is noted, a snapshot that fills is given up, and it
waits for another.

Takes the keys resync, retired and digest, the worker's name, the server's time in ms, what its record says of this
(truth) and what has changed. Gives drop(record) -> there was a snapshot, diverged(cause) and ask(record, cause).
--]]
local call = redis.call

return function(RESYNC, RETIRED, DIGEST, WORKER, now, truth, changed)
  local function drop(record)
    if not record.shadow then return false end
    call("SADD", RETIRED, record.shadow)
    call("HDEL", DIGEST, "~" .. WORKER)
    record.shadow, record.snapshot, changed.record, changed.shadow = nil, nil, true, false
    return true
  end

  local function diverged(cause)
    if truth.cause and truth.cause ~= "join" then return end
    truth.cause, truth.found, changed.record = cause, (truth.found or 0) + 1, true
  end

  -- One already commanded keeps its turn, unless it had begun and is now spoilt.
  local function ask(record, cause)
    diverged(cause)
    if drop(record) then call("ZADD", RESYNC, -now, WORKER) else call("ZADD", RESYNC, "NX", -now, WORKER) end
  end

  return drop, diverged, ask
end
