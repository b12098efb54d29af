--[[
forget: deletes a worker that is gone. With the last worker of an API server it deletes the server and the artifacts
that the server published.

Guarantee: nothing of the worker stays but entries of retired slots, which collect removes. With silent_ms > 0 the
worker is deleted only if it was silent for that time and its stream is empty, because it may have come back since tick
named it. Its open reservations do not count for a worker that joins under its id later: a new row has a new epoch.

ARGV: prefix, worker_id, silent_ms (0: delete the worker even if it lives)
Returns: 1 if the worker or its server was deleted, else 0
Cost: O(workers + artifact chunks)
Keys that depend on data: events:<worker_id>, command:<worker_id>, probe:<worker_id>, running:<worker_id>,
      server:<server_id>, artifact:<server_id>:<sha256>
--]]
local workers_key, servers_key, load_key, alive_key, alive_servers_key, cursor_key, batch_key, digest_key, resync_key,
  retired_key, ejections_key, sets_key, tiers_key, stores_key = unpack(KEYS)
local prefix, worker_id, silent_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local UNLINK_AT_ONCE = 500

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function silent(heard_key, name, stream)
  if silent_ms == 0 then return true end
  local seen = tonumber(call("ZSCORE", heard_key, name) or "0")
  local length = redis.pcall("XLEN", prefix .. stream)
  return seen <= now - silent_ms and (type(length) ~= "number" or length == 0)
end

local function forget_worker()
  local row, record = call("HGET", load_key, worker_id), call("HGET", workers_key, worker_id)
  if not silent(alive_key, worker_id, "events:" .. worker_id) then return 0 end
  call("ZREM", resync_key, worker_id) -- first write, which frees memory: a full Redis then allows other writes
  if row then call("SADD", retired_key, (struct.unpack(ROW_SLOT, row, SLOT_AT))) end
  local known = record and cjson.decode(record) or {}
  local keys = { sets_key, tiers_key, retired_key, digest_key, stores_key }
  local _, _, drop_sets = (include "shared/further_sets")(keys, worker_id)
  drop_sets(known)
  local shadow = known.shadow
  if shadow then call("SADD", retired_key, shadow) end
  for _, key in ipairs({ workers_key, load_key, batch_key, ejections_key }) do call("HDEL", key, worker_id) end
  call("HDEL", digest_key, worker_id, "~" .. worker_id)
  call("HDEL", cursor_key, "events:" .. worker_id)
  call("ZREM", alive_key, worker_id)
  call("UNLINK", prefix .. "events:" .. worker_id, prefix .. "command:" .. worker_id, prefix .. "probe:" .. worker_id,
    prefix .. "running:" .. worker_id)
  return (row or record) and 1 or 0
end

local function forget_server(server)
  for _, worker in ipairs(call("HKEYS", load_key)) do
    if worker:match("^(.*)%.%d+$") == server then return 0 end
  end
  local record = call("HGET", servers_key, server)
  if not silent(alive_servers_key, server, "server:" .. server) then return 0 end
  local keys = { prefix .. "server:" .. server }
  for _, file in pairs(record and cjson.decode(record).artifacts or {}) do
    for _, sha256 in ipairs(file.chunks) do keys[#keys + 1] = prefix .. "artifact:" .. server .. ":" .. sha256 end
  end
  for at = 1, #keys, UNLINK_AT_ONCE do call("UNLINK", unpack(keys, at, math.min(at + UNLINK_AT_ONCE - 1, #keys))) end
  call("HDEL", servers_key, server)
  call("HDEL", cursor_key, "server:" .. server)
  call("ZREM", alive_servers_key, server)
  return record and 1 or 0
end

local gone = forget_worker()
local server = worker_id:match("^(.*)%.%d+$")
return server and math.max(gone, forget_server(server)) or gone
