--[[
apply_control/snapshot: begin and end of a snapshot. At the begin a worker gets a second slot (shadow), which becomes
its slot once the snapshot is complete.

Takes the keys digest, next_slot, resync and retired, the worker's id, the server's time in ms, the record's `truth`
(differences between index and engine), and three functions: count(counter), lost(cause), drop_shadow(record).
Returns begin(record, command, data of the entry) and finish(record, row, data of the entry).
--]]
local call = redis.call

return function(digest_key, next_slot_key, resync_key, retired_key, worker_id, now, truth, count, lost, drop_shadow)
  local shadow_name = "~" .. worker_id

  local function begin(record, command, said)
    if type(said.snapshot) ~= "string" or not said.snapshot:match("^%x%x%x%x%x%x%x%x$") then
      return count("malformed")
    end
    drop_shadow(record)
    record.shadow, record.snapshot = call("INCR", next_slot_key), said.snapshot
    if command.id and said.command == command.id then command.id, command["do"] = nil, nil end
    call("ZADD", resync_key, now, worker_id)
  end

  -- Readers see the old slot or the new one, and the new one only if it holds exactly the blocks that were sent.
  local function finish(record, row, done)
    if type(done.snapshot) ~= "string" then return count("malformed") end
    if done.snapshot ~= record.snapshot then return count("stale") end
    local digest = call("HGET", digest_key, shadow_name) or string.rep("\0", DIGEST_BYTES)
    local blocks, high, low = struct.unpack(DIGEST_SUMS, digest)
    if done.count ~= blocks or done.high ~= high or done.low ~= low then return lost("spoilt") end
    call("SADD", retired_key, row[SLOT_FIELD])
    call("HSET", digest_key, worker_id, digest)
    call("HDEL", digest_key, shadow_name)
    call("ZREM", resync_key, worker_id)
    row[SLOT_FIELD], record.slot, record.shadow, record.snapshot = record.shadow, record.shadow, nil, nil
    record.differs = nil -- the further sets come next
    row[FLAGS_FIELD] = bit.band(row[FLAGS_FIELD], bit.bnot(FLAG_PARTIAL))
    local cause, resyncs = truth.cause or "worker", truth.resyncs or {}
    resyncs[cause] = (resyncs[cause] or 0) + 1
    truth.cause, truth.healed, truth.checked, truth.resyncs = nil, truth.found, now, resyncs
    count("resync_" .. cause)
  end

  return begin, finish
end
