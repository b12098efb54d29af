--[[
register: an approximate worker (an engine without the plugin), which a router manages and health-checks.

Guarantee: the first call makes its slot and its row; a call again is its heartbeat. healthy = 0 takes it out of
`alive` at once. A worker that returns after that, or whose scheme changed, gets a new slot: it may have been restarted,
so what it was sent before counts for nothing. Never touches a worker that joined by its own stream.

KEYS: workers load alive next_slot retired
ARGV: worker_id, record (JSON object with scheme_id, url, models), capacity_checkpoints, healthy (0/1)
Returns: slot
Cost: O(log W)
--]]
local workers_key, load_key, alive_key, next_slot_key, retired_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker_id, record_json, capacity, healthy = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local SERVER, URL, APPROXIMATE, CLOSED = 1, 2, 16, 32
local FLAGS = SERVER + URL + APPROXIMATE + CLOSED
local call = redis.call

if not capacity or capacity < 1 or capacity > 4294967295 then
  return redis.error_reply("BAD_ARGUMENT capacity_checkpoints must be 1 or more")
end
local readable, record = pcall(cjson.decode, record_json)
if not readable or type(record) ~= "table" then return redis.error_reply("BAD_ARGUMENT the record is not JSON") end
local scheme = tonumber(record.scheme_id) or 0
local row = call("HGET", load_key, worker_id)
local epoch, prefill, decode, in_flight, slot, flags, old_scheme, speed = nil, 0, 0, 0, nil, FLAGS, nil, 0
if row then
  epoch, prefill, decode, in_flight, slot, flags, old_scheme, speed = struct.unpack(">I4i4i4i4I4I2I4I4", row)
  if bit.band(flags, APPROXIMATE) == 0 then
    return redis.error_reply("BAD_ARGUMENT " .. worker_id .. " has a plugin and joins by its own stream")
  end
end

if healthy ~= "1" then
  call("ZREM", alive_key, worker_id)
  if slot then return slot end
end
if not slot or old_scheme ~= scheme or not call("ZSCORE", alive_key, worker_id) then
  if slot and healthy == "1" then call("SADD", retired_key, slot) end
  if not slot or healthy == "1" then slot = call("INCR", next_slot_key) end
end
-- The row's capacity_blocks holds the bound of the mirror, in checkpoints: settle keeps to it.
epoch = epoch or call("INCR", next_slot_key)
local head = struct.pack(">I4i4i4i4I4I2I4I4", epoch, prefill, decode, in_flight, slot, flags, scheme, speed)
local begun = row and row:sub(51, 58) or ("\0"):rep(8)
call("HSET", load_key, worker_id, head .. struct.pack(">I4I4I4I4I4", 0, 0, 0, capacity, 0) .. begun .. worker_id)
record.slot = slot
call("HSET", workers_key, worker_id, cjson.encode(record))
if healthy == "1" then
  local time = call("TIME")
  call("ZADD", alive_key, time[1] * 1000 + math.floor(time[2] / 1000), worker_id)
end
return slot
