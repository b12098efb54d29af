--[[
register: notes a replica's check of an approximate worker (an engine without the plugin, which the operator listed).

Guarantee: the first check that passes makes the worker's slot and row; each later one is its heartbeat. A worker that
comes back into `alive`, whose process started anew, or whose scheme changed, gets a new slot, so that the blocks of its
earlier prompts do not count. A worker that joined by its own stream is never touched.
Several replicas may check one worker. If the replica whose check passed last reports a failure, the worker leaves
`alive` at once; if another replica does, at its second failure in a row without a passed check in between. A time-out
while requests run there always needs two, because the engine may only be busy. If a replica stops listing the worker,
its first call changes nothing. From its second on the worker drains, unless another replica's check passed in between,
and `forget` deletes it when no request runs there. A call of a replica that lists the worker ends the draining.
A scheme stays until no replica has confirmed it for ttl_ms, or the replica whose check passed last changes it. `paused`
stays until a check asks the engine again, or the engine is down or starts anew. `wait_ms` stays until a check asks
again, for ttl_ms at most: it is booked as load of requests from elsewhere, so the engine has no room (shared/turns).
MISNAMED is set while the engine does not list its pool's name.

ARGV: worker_id, record_json (an object with scheme_id, url, models, and started: seconds, 0 if it is not known),
      capacity_blocks, found (PASSED, FAILED, SLOW: no answer in time, or LEAVING: the worker is not listed any more),
      replica (a random word), since_ms (time for which this replica has found the same: 0 the first time), ttl_ms,
      paused (1, 0; empty: not asked), wait_ms (time until a new request would start on the engine; empty: not asked),
      cause, reason (of a failed check: a word, and a sentence for people; stored until a check passes)
Returns: {slot, requests in flight, word}: UP; OUT (a check failed, or none has ever passed); LEAVING (it drains);
      LISTED (another replica lists it); GONE (it was forgotten)
Cost: O(log W)
--]]
local workers_key, load_key, alive_key, next_slot_key, retired_key, tick_key = unpack(KEYS)
local worker_id, record_json, capacity_blocks, found = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local replica, since_ms, ttl_ms, paused, wait_ms = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
local cause, reason = ARGV[10], ARGV[11]

local NEW_FLAGS = FLAG_SERVER + FLAG_URL + FLAG_APPROXIMATE + FLAG_CLOSED
local HEARTBEAT_MS = 5000 -- the interval of the plugin's heartbeats
local MAX_CAPACITY = 4294967295 -- the largest number that a row can hold
local call, band, misnamed = redis.call, bit.band, include "shared/misnamed"

if not capacity_blocks or capacity_blocks < 1 or capacity_blocks > MAX_CAPACITY or not since_ms or not ttl_ms then
  return redis.error_reply("BAD_ARGUMENT capacity_blocks must be 1 or more, since_ms and ttl_ms numbers")
end
local readable, record = pcall(cjson.decode, record_json)
if not readable or type(record) ~= "table" then return redis.error_reply("BAD_ARGUMENT the record is not JSON") end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local row, before = call("HGET", load_key, worker_id), nil
local epoch, slot, old_scheme
local flags = NEW_FLAGS
local prefill, decode, in_flight, speed = 0, 0, 0, 0
local foreign, blocks, busy_share, evicted = 0, 0, 0, 0
if row then
  epoch, prefill, decode, in_flight, slot, flags, old_scheme, speed = struct.unpack(ROW_EPOCH_TO_SPEED_TPS, row)
  if band(flags, FLAG_APPROXIMATE) == 0 then
    return redis.error_reply("BAD_ARGUMENT " .. worker_id .. " has a plugin and joins by its own stream")
  end
  local _
  foreign, _, blocks, _, busy_share, evicted =
    struct.unpack(ROW_FOREIGN_PREFILL_TOKENS_TO_EVICTED, row, FOREIGN_PREFILL_TOKENS_AT)
  before = cjson.decode(call("HGET", workers_key, worker_id) or "{}")
elseif found ~= "PASSED" then
  return { 0, 0, found == "LEAVING" and "GONE" or "OUT" }
end
before = before or {}
-- Note the time of this check, because `tick` lets replicas delete a worker that none of them checks any more.
before.checked = now

if found == "FAILED" or found == "SLOW" then
  local nobody_since = since_ms > 0 and (before.passed or 0) <= now - since_ms
  local at_work = found == "SLOW" and in_flight > 0
  if before.replica == replica and not at_work or nobody_since then call("ZREM", alive_key, worker_id) end
  before.cause, before.reason = cause, reason
  call("HSET", workers_key, worker_id, cjson.encode(before))
  return { slot, in_flight, call("ZSCORE", alive_key, worker_id) and "UP" or "OUT" }
end

local up = row and call("ZSCORE", alive_key, worker_id)
if found == "LEAVING" and not before.leaving then
  -- `alive` has the time of the last check that passed, also if a replica of before 2026-11-23 made it.
  local others = before.replica ~= replica and tonumber(up or 0) > now - ttl_ms
  if others or since_ms == 0 then return { slot, in_flight, others and "LISTED" or "UP" } end
end

-- Apply a check that passed. It may change the scheme only if the replica of the last passed check made it, or if no
-- replica confirms the old scheme any more.
local scheme, confirmed = tonumber(record.scheme_id) or 0, now
if up and scheme ~= old_scheme and before.replica ~= replica and (before.confirmed or 0) > now - ttl_ms then
  record, scheme, confirmed = before, old_scheme, before.confirmed
end
local started = math.max(tonumber(record.started) or 0, tonumber(before.started) or 0)
local restarted = (tonumber(before.started) or 0) > 0 and started > before.started
local anew = not up or restarted
local leaving = before.leaving
if found == "LEAVING" then
  leaving = leaving or band(flags, FLAG_DRAINING) > 0 and "drained" or "listed"
  flags = bit.bor(flags, FLAG_DRAINING)
elseif leaving then
  if leaving == "listed" then flags = flags - band(flags, FLAG_DRAINING) end
  leaving = nil
end
flags = bit.bor(band(flags, bit.bnot(FLAG_MISNAMED)), misnamed(load_key, record.models) and FLAG_MISNAMED or 0)
if not slot or old_scheme ~= scheme or anew then
  if slot then call("SADD", retired_key, slot) end
  slot, blocks = call("INCR", next_slot_key), 0
end
epoch = epoch or call("INCR", next_slot_key)
if paused ~= "" or anew then
  flags = flags - band(flags, FLAG_PAUSED) + (paused == "1" and FLAG_PAUSED or 0)
end
record.told = before.told
if tonumber(wait_ms) then
  local median = tonumber((call("GET", tick_key) or ""):match("^%d+ %d+ (%d+)") or 0)
  local tps = speed > 0 and speed or median > 0 and median or UNKNOWN_SPEED
  record.told, foreign = now, 0
  if tonumber(wait_ms) > 0 then foreign = math.max(1, math.floor(wait_ms * tps / 1000) - math.max(0, prefill)) end
elseif anew or now - (record.told or 0) >= ttl_ms then
  foreign = 0
end
-- `settle` adds evicted blocks to this number. Faded at this rate, it is about what was evicted in HEARTBEAT_MS.
evicted = math.floor(evicted * math.exp(-math.max(0, now - (tonumber(before.passed) or now)) / HEARTBEAT_MS))
local head = struct.pack(ROW_EPOCH_TO_SPEED_TPS, epoch, prefill, decode, in_flight, slot, flags, scheme, speed)
local middle = struct.pack(ROW_FOREIGN_PREFILL_TOKENS_TO_EVICTED, foreign, 0, blocks, capacity_blocks, busy_share,
  evicted)
local rest = row and row:sub(AFTER_EVICTED) or ("\0"):rep(WORKER_ID_AT - AFTER_EVICTED) .. worker_id
call("HSET", load_key, worker_id, head .. middle .. rest)
record.slot, record.started, record.confirmed, record.leaving = slot, started, confirmed, leaving
record.cause, record.reason = nil, nil -- of an earlier check that failed
record.passed, record.checked, record.replica = now, now, replica
call("HSET", workers_key, worker_id, cjson.encode(record))
call("ZADD", alive_key, now, worker_id)
return { slot, in_flight, leaving and "LEAVING" or "UP" }
