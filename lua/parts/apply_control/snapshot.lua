--[[
apply_control/snapshot: begin and end of a snapshot: a worker gets a shadow slot, and changes over to it when it is
whole.

Takes the keys digest, next_slot, resync and retired, the worker's name, the server's time in ms, what its record says
of divergences (truth); count, lost and what gives up a snapshot. Gives begin(record, command, what the entry says) and
finish(record, row, what the entry says).
--]]
local call = redis.call
local SLOT, FLAGS, PARTIAL = 5, 6, 64 -- of the row; a flag

return function(DIGEST, NEXT_SLOT, RESYNC, RETIRED, WORKER, now, truth, count, lost, drop_shadow)
  local SHADOW = "~" .. WORKER

  local function begin(record, command, said)
    if type(said.snapshot) ~= "string" or not said.snapshot:match("^%x%x%x%x%x%x%x%x$") then
      return count("malformed")
    end
    drop_shadow(record)
    record.shadow, record.snapshot = call("INCR", NEXT_SLOT), said.snapshot
    if command.id and said.command == command.id then command.id, command["do"] = nil, nil end
    call("ZADD", RESYNC, now, WORKER)
  end

  -- Readers see the old slot or the new one, and the new one only if it holds exactly what was sent.
  local function finish(record, row, done)
    if type(done.snapshot) ~= "string" then return count("malformed") end
    if done.snapshot ~= record.snapshot then return count("stale") end
    local digest = call("HGET", DIGEST, SHADOW) or string.rep("\0", 12)
    local blocks, high, low = struct.unpack(">I4I4I4", digest)
    if done.count ~= blocks or done.high ~= high or done.low ~= low then return lost("spoilt") end
    call("SADD", RETIRED, row[SLOT])
    call("HSET", DIGEST, WORKER, digest)
    call("HDEL", DIGEST, SHADOW)
    call("ZREM", RESYNC, WORKER)
    row[SLOT], record.slot, record.shadow, record.snapshot = record.shadow, record.shadow, nil, nil
    row[FLAGS] = bit.band(row[FLAGS], bit.bnot(PARTIAL))
    local cause, of = truth.cause or "worker", truth.resyncs or {}
    of[cause] = (of[cause] or 0) + 1
    truth.cause, truth.healed, truth.checked, truth.resyncs = nil, truth.found, now, of
    count("resync_" .. cause)
  end

  return begin, finish
end
