--[[
shared/resync: functions for a worker whose index differs from its engine's block table.

Takes the keys resync, retired and digest, the worker's id, the server's time in ms, the record's `truth` (noted
differences), and the table of what this call has changed. Returns
  drop(record): drops the snapshot that is being sent; returns whether there was one
  diverged(cause): notes the difference and its cause
  ask(record, cause): does both, and puts the worker in the line for a new snapshot
In `resync` a worker that waits for a snapshot has the score -(ms when it began to wait), and one whose snapshot was
commanded has +(ms of the command or of the last progress). After a spoilt snapshot it waits behind all others.
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

  -- A command for a snapshot stays valid, unless the snapshot has begun: then it is spoilt, and the worker waits again.
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
