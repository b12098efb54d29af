--[[
shared/release_lease: functions that end a lease.

Guarantee: the lease is deleted first. That frees memory, so that a Redis at its limit allows the writes after it.
Takes the keys of load, leases and lease, the key prefix, and the server's time in ms. Returns a table of functions:
  add: see shared/row_load; speculation(id, lease): see shared/release_speculation
  load(lease, unsent): gives back the booked load; returns the worker's row as it was before
  forget(id): deletes the lease
  client(id): ends the client's count of the request; returns shared/client_use of the client, nil if it has no limits
  reap(ids): does speculation, load, forget and client for leases that are due, unless their engine has the request
    (shared/running)
--]]
local call = redis.call

return function(load_key, leases_key, lease_key, prefix, now)
  local release = { add = (include "shared/row_load")(load_key, now) }
  release.speculation = (include "shared/release_speculation")(prefix)

  function release.load(lease, unsent)
    local epoch, _, prefill, decode, _, _, stage, length, at = struct.unpack(LEASE, lease)
    if stage > STAGE_STARTED then return end
    return select(3, release.add(lease:sub(at, at + length - 1), epoch, -prefill, -decode, -1, unsent))
  end

  function release.forget(id)
    call("ZREM", leases_key, id)
    call("HDEL", lease_key, id)
  end

  function release.client(id)
    if #id < CLIENT_AT then return end
    local client = (include "shared/client_use")(prefix, id, now)
    client.let_go()
    return client
  end

  function release.reap(ids)
    if not ids[1] then return end
    call("ZREM", leases_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
    local extend = (include "shared/running")(load_key, leases_key, prefix, now)
    for _, id in ipairs(ids) do
      local lease = call("HGET", lease_key, id)
      if not lease or not extend(id, lease) then
        release.forget(id)
        release.client(id)
        if lease then
          release.load(lease)
          release.speculation(id, lease)
        end
      end
    end
  end

  return release
end
