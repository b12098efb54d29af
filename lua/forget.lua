--[[
forget: deletes a worker that is gone; and its API server, with the artifacts that it brought, once that has no worker
left.

Guarantee: nothing of it stays but entries of retired slots, which collect removes. With silent_ms > 0 it is deleted
only if it was silent for so long and its stream is empty: it may have come back since it was found to be due. With 0 it
is deleted in any case. Its open reservations do not hurt a successor: a new row has another epoch.

KEYS: workers servers load alive alive_servers cursor batch digest resync retired ejections
ARGV: prefix, worker_id, silent_ms
Returns: 1 if the worker or its server was forgotten, else 0
Cost: O(workers + artifact chunks)
Keys that depend on data: events:<worker_id>, command:<worker_id>, probe:<worker_id>, server:<server_id>,
      artifact:<server_id>:<sha256>
--]]
local WORKERS, SERVERS, LOAD, ALIVE, ALIVE_SERVERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local CURSOR, BATCH, DIGEST, RESYNC, RETIRED = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local EJECTIONS = KEYS[11]
local PREFIX, WORKER_ID, SILENT_MS = ARGV[1], ARGV[2], tonumber(ARGV[3])
local UNLINK_AT_ONCE = 500

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function silent(alive_key, name, stream)
  if SILENT_MS == 0 then return true end
  local seen = tonumber(call("ZSCORE", alive_key, name) or "0")
  local length = redis.pcall("XLEN", PREFIX .. stream)
  return seen <= now - SILENT_MS and (type(length) ~= "number" or length == 0)
end

local function forget_worker()
  local row, record = call("HGET", LOAD, WORKER_ID), call("HGET", WORKERS, WORKER_ID)
  if not silent(ALIVE, WORKER_ID, "events:" .. WORKER_ID) then return 0 end
  call("ZREM", RESYNC, WORKER_ID) -- the first write frees memory: a full Redis then allows the writes after it
  if row then call("SADD", RETIRED, (struct.unpack(ROW_SLOT, row, SLOT_AT))) end
  local shadow = record and cjson.decode(record).shadow
  if shadow then call("SADD", RETIRED, shadow) end
  for _, key in ipairs({ WORKERS, LOAD, BATCH, EJECTIONS }) do call("HDEL", key, WORKER_ID) end
  call("HDEL", DIGEST, WORKER_ID, "~" .. WORKER_ID)
  call("HDEL", CURSOR, "events:" .. WORKER_ID)
  call("ZREM", ALIVE, WORKER_ID)
  call("UNLINK", PREFIX .. "events:" .. WORKER_ID, PREFIX .. "command:" .. WORKER_ID, PREFIX .. "probe:" .. WORKER_ID)
  return (row or record) and 1 or 0
end

local function forget_server(server)
  for _, worker in ipairs(call("HKEYS", LOAD)) do
    if worker:match("^(.*)%.%d+$") == server then return 0 end
  end
  local record = call("HGET", SERVERS, server)
  if not silent(ALIVE_SERVERS, server, "server:" .. server) then return 0 end
  local keys = { PREFIX .. "server:" .. server }
  for _, file in pairs(record and cjson.decode(record).artifacts or {}) do
    for _, sha256 in ipairs(file.chunks) do keys[#keys + 1] = PREFIX .. "artifact:" .. server .. ":" .. sha256 end
  end
  for at = 1, #keys, UNLINK_AT_ONCE do call("UNLINK", unpack(keys, at, math.min(at + UNLINK_AT_ONCE - 1, #keys))) end
  call("HDEL", SERVERS, server)
  call("HDEL", CURSOR, "server:" .. server)
  call("ZREM", ALIVE_SERVERS, server)
  return record and 1 or 0
end

local gone = forget_worker()
local server = WORKER_ID:match("^(.*)%.%d+$")
return server and math.max(gone, forget_server(server)) or gone
