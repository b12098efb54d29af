--[[
shared/resync: when a worker's index differs from its engine's table, notes the cause, gives up a snapshot that is being
sent, and lets the worker wait for another.

Takes the keys resync, retired and digest, the worker's name, the server's time in ms, what the worker's record says of
divergences (truth), and the table of what this call has changed. Returns drop(record) -> whether a snapshot was being
sent, diverged(cause), and ask(record, cause), which does both and makes the worker wait.
In `resync` a worker that waits has the score -(ms since when); a worker whose snapshot was commanded has +(ms of that,
or of its last progress). With one score for all that wait, a worker whose snapshots fail would starve those behind it.
--]]
local call = redis.call

return function(resync_key, retired_key, digest_key, worker_id, now, truth, changed)
  local function drop(record)
    if not record.shadow then return false end
    call("SADD", retired_key, record.shadow)
    call("HDEL", digest_key, "~" .. worker_id)
    record.shadow, record.snapshot, changed.record, changed.shadow = nil, nil, true, false
    return true
  end

  local function diverged(cause)
    if truth.cause and truth.cause ~= "join" then return end
    truth.cause, truth.found, changed.record = cause, (truth.found or 0) + 1, true
  end

  -- A snapshot that was commanded keeps its turn, unless it had begun: then it is spoilt, and the worker waits again.
  local function ask(record, cause)
    diverged(cause)
    if drop(record) then
      call("ZADD", resync_key, -now, worker_id)
    else
      call("ZADD", resync_key, "NX", -now, worker_id)
    end
  end

  return drop, diverged, ask
end
