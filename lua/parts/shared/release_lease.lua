--[[
shared/release_lease: what is left of a lease is given back: its load, its speculation, itself.

Takes the keys of load, leases and lease, the key prefix and the server's time in ms. Gives add (see shared/row_load),
load(lease), forget(id), speculation(id, lease), and reap(ids): all three of each, for leases that have expired. What is
forgotten comes first: a first write that frees memory is allowed when Redis is full, and so are those after it.
--]]
local call = redis.call
local LEASE, STARTED = ">I4I4I4I4I4I4BB", 1

return function(load_key, leases_key, lease_key, prefix, now)
  local over = { add = (include "shared/row_load")(load_key, now) }

  function over.load(lease)
    local epoch, _, prefill, decode, _, _, stage, length, at = struct.unpack(LEASE, lease)
    if stage > STARTED then return end
    over.add(lease:sub(at, at + length - 1), epoch, -prefill, stage == STARTED and -decode or 0, -1)
  end

  function over.forget(id)
    call("ZREM", leases_key, id)
    call("HDEL", lease_key, id)
  end

  function over.speculation(id, lease)
    local _, slot, _, _, _, _, _, length, at = struct.unpack(LEASE, lease)
    slot = string.format("%d", slot)
    call("UNLINK", prefix .. "c:" .. slot .. ":" .. id)
    for from = at + length, #lease, 8 do
      local key = prefix .. "x:" .. lease:sub(from, from + 7)
      if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. "+") end
    end
  end

  function over.reap(ids)
    for _, id in ipairs(ids) do
      local lease = call("HGET", lease_key, id)
      over.forget(id)
      if lease then
        over.load(lease)
        over.speculation(id, lease)
      end
    end
  end

  return over
end
