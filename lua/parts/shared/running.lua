--[[
shared/running: the reservations that an engine has, as it tells itself: key running:<worker_id>, a ZSET of reservation
id -> ms when the engine last named it. Its member `` has the ms when the set was last known to equal the engine's own.

Guarantee: a reservation that its engine has needs no renewal, as long as the engine goes on telling which it has. In a
time of grace (tick) what it told last counts: Redis or all routers were away, so what it tells now waits unread.
Takes the keys of load and leases, the key prefix, and the server's time in ms. Returns extend(id, lease), which extends
a lease that is due if its engine has the request; it returns whether it did.
--]]
local call = redis.call

return function(load_key, leases_key, prefix, now)
  local function in_grace()
    local ticked, grace_until = string.match(call("GET", prefix .. "tick") or "", "^(%d+) (%d+)")
    return not ticked or now - ticked > GRACE_AFTER_MS or now - ticked < 0 or now - grace_until < 0
  end

  return function(id, lease)
    local epoch, _, _, _, _, _, stage, length, at = struct.unpack(LEASE, lease)
    if stage > STAGE_STARTED then return false end
    local worker = lease:sub(at, at + length - 1)
    local running_key = prefix .. "running:" .. worker
    local right_ms = tonumber(call("ZSCORE", running_key, "") or "0")
    if right_ms == 0 or not call("ZSCORE", running_key, id) then return false end
    if right_ms < now - BELIEVED_MS and not in_grace() then return false end
    local row = call("HGET", load_key, worker)
    if not row or struct.unpack(ROW_EPOCH, row) ~= epoch then return false end
    call("ZADD", leases_key, string.format("%d", now + EXTENDED_MS), id)
    if #id >= CLIENT_AT then (include "shared/client_use")(prefix, id, now).renew(now + EXTENDED_MS) end
    return true
  end
end
