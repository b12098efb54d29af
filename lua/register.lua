--[[
register: registers an approximate worker (an engine without the plugin), which a router manages and health-checks.

Guarantee: the first call makes its slot and its row; each later call is its heartbeat. healthy = 0 takes it out of
`alive` at once. A worker that comes back after that, or whose scheme changed, gets a new slot: it may have been
restarted, so the blocks it was sent before count for nothing. A worker that joined by its own stream is never touched.

KEYS: workers load alive next_slot retired
ARGV: worker_id, record_json (an object with scheme_id, url, models), capacity_checkpoints, healthy (0/1)
Returns: slot
Cost: O(log W)
--]]
local workers_key, load_key, alive_key, next_slot_key, retired_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker_id, record_json, capacity_checkpoints, healthy = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local FLAG_SERVER, FLAG_URL, FLAG_APPROXIMATE, FLAG_CLOSED = 1, 2, 16, 32
local FLAGS = FLAG_SERVER + FLAG_URL + FLAG_APPROXIMATE + FLAG_CLOSED
local ROW_EPOCH_TO_SPEED_TPS, ROW_FOREIGN_PREFILL_TOKENS_TO_EVICTED = ">I4i4i4i4I4I2I4I4", ">I4I4I4I4I4"
local UNDER_WAY_TOKENS_AT, WORKER_ID_AT, MAX_CAPACITY = 51, 59, 4294967295 -- of a packed row
local call = redis.call

if not capacity_checkpoints or capacity_checkpoints < 1 or capacity_checkpoints > MAX_CAPACITY then
  return redis.error_reply("BAD_ARGUMENT capacity_checkpoints must be 1 or more")
end
local readable, record = pcall(cjson.decode, record_json)
if not readable or type(record) ~= "table" then return redis.error_reply("BAD_ARGUMENT the record is not JSON") end
local scheme = tonumber(record.scheme_id) or 0
local row = call("HGET", load_key, worker_id)
local epoch, prefill, decode, in_flight, slot, flags, old_scheme, speed = nil, 0, 0, 0, nil, FLAGS, nil, 0
if row then
  epoch, prefill, decode, in_flight, slot, flags, old_scheme, speed = struct.unpack(ROW_EPOCH_TO_SPEED_TPS, row)
  if bit.band(flags, FLAG_APPROXIMATE) == 0 then
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
-- In the row of an approximate worker capacity_blocks is the most checkpoints that settle keeps in its mirror.
epoch = epoch or call("INCR", next_slot_key)
local head = struct.pack(ROW_EPOCH_TO_SPEED_TPS, epoch, prefill, decode, in_flight, slot, flags, scheme, speed)
local middle = struct.pack(ROW_FOREIGN_PREFILL_TOKENS_TO_EVICTED, 0, 0, 0, capacity_checkpoints, 0)
local under_way = row and row:sub(UNDER_WAY_TOKENS_AT, WORKER_ID_AT - 1)
  or ("\0"):rep(WORKER_ID_AT - UNDER_WAY_TOKENS_AT)
call("HSET", load_key, worker_id, head .. middle .. under_way .. worker_id)
record.slot = slot
call("HSET", workers_key, worker_id, cjson.encode(record))
if healthy == "1" then
  local time = call("TIME")
  call("ZADD", alive_key, time[1] * 1000 + math.floor(time[2] / 1000), worker_id)
end
return slot
