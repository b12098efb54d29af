--[[
shared/release_lease: ends a lease: gives back its load, its speculation (shared/release_speculation), its place among
its client's requests, and the lease itself.

Guarantee: the lease is forgotten first. That frees memory, so that a Redis at its limit allows the writes after it.
Takes the keys of load, leases and lease, the key prefix, and the server's time in ms. Returns six functions: add (see
shared/row_load), load(lease, unsent), which returns the worker's row as it was, forget(id), speculation(id, lease) (see
shared/release_speculation), client(id), which returns what its client uses (shared/client_use) after this request, nil
if it has no limits, and reap(ids), which does the last four for leases that have expired.
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
    for _, id in ipairs(ids) do
      local lease = call("HGET", lease_key, id)
      release.forget(id)
      release.client(id)
      if lease then
        release.load(lease)
        release.speculation(id, lease)
      end
    end
  end

  return release
end
