--[[
settle: the end, or the first token, of a reservation.

Guarantee: subtracts exactly what the lease still holds, once; a call again changes nothing. A worker that joined
anew (another epoch) owes nothing. The outcome of an id that was never booked, if it failed or was cancelled, leaves a
tombstone, so that a decide that comes late books nothing. What a finished request computed and the engine has not yet
reported stays credited to its worker for linger_ms: the report is on its way. Reaps a few expired leases, so that
decide need not.

KEYS: load leases lease
ARGV: prefix, id, outcome (started, finished, failed, cancelled), tombstone_ms, linger_ms
Returns: {what happened}: STARTED, SETTLED, UNKNOWN (tombstone if failed or cancelled), SAME (nothing to do)
Cost: O(log leases + checkpoints), at most 8 leases reaped
Keys that depend on data: x:<hash>, b:<hash>, lru:<slot>, c:<slot>:<id>
--]]
local load_key, leases_key, lease_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, id, outcome = ARGV[1], ARGV[2], ARGV[3]
local tombstone_ms, linger_ms = tonumber(ARGV[4]), tonumber(ARGV[5])

local BOOKED, STARTED, LINGERING, TOMBSTONE = 0, 1, 2, 3
local APPROXIMATE, MAX_REAPED = 16, 8
local call = redis.call

if id == "" or not tombstone_ms or not linger_ms then
  return redis.error_reply("BAD_ARGUMENT settle needs an id, tombstone_ms and linger_ms")
end
if outcome ~= "started" and outcome ~= "finished" and outcome ~= "failed" and outcome ~= "cancelled" then
  return redis.error_reply("BAD_ARGUMENT unknown outcome " .. outcome)
end
local time = call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local lease_over = (include "shared/release_lease")(load_key, leases_key, lease_key, prefix, now)
local function reap() lease_over.reap(call("ZRANGEBYSCORE", leases_key, "-inf", now, "LIMIT", 0, MAX_REAPED)) end

-- An approximate worker keeps what it was sent, oldest prompt and deepest block given up first: its mirror. Each
-- checkpoint there keeps its own trail, the hashes up to the next one, and a longer chain lengthens it.
local function mirror(lease)
  local _, slot, _, _, _, _, _, length, at = struct.unpack(">I4I4I4I4I4I4BB", lease)
  local row = call("HGET", load_key, lease:sub(at, at + length - 1))
  if not row then return end
  local row_slot, flags, _, _, _, _, _, capacity = struct.unpack(">I4I2I4I4I4I4I4I4", row, 17)
  if row_slot ~= slot or bit.band(flags, APPROXIMATE) == 0 then return end
  slot = string.format("%d", slot)
  local lru, added, depth, here = prefix .. "lru:" .. slot, 0, 0, 1
  local chain = call("GET", prefix .. "c:" .. slot .. ":" .. id) or ""
  for from = at + length, #lease, 8 do
    local hash, there = lease:sub(from, from + 7), chain:find(lease:sub(from + 8, from + 15), here + 8, true)
    local key, trail = prefix .. "x:" .. hash, chain:sub(here + 8, (there or 0) + 7)
    depth = depth + 1
    if call("ZADD", lru, string.format("%.0f", time[1] * 1000000 + time[2] - depth), hash) == 1 then
      added = added + 1
      call("HINCRBY", key, slot, 1)
      call("HSET", key, slot .. "=", trail)
    elseif #trail > call("HSTRLEN", key, slot .. "=") then
      local kept = call("HGET", key, slot .. "=") or ""
      if trail:sub(1, #kept) == kept then call("HSET", key, slot .. "=", trail) end
    end
    here = there or here
  end
  local over = math.min(call("ZCARD", lru) - capacity, added + 64)
  if over <= 0 then return end
  local evicted = call("ZPOPMIN", lru, over)
  for i = 1, #evicted, 2 do
    local key = prefix .. "x:" .. evicted[i]
    call("HDEL", key, slot .. "=")
    if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. "+") end
  end
end

local lease = call("HGET", lease_key, id)
if not lease then
  call("ZREM", leases_key, id) -- a first write that frees memory is allowed when Redis is full, so are those after it
  reap()
  if outcome == "failed" or outcome == "cancelled" then
    call("ZADD", leases_key, now + tombstone_ms, id)
    call("HSET", lease_key, id, struct.pack(">I4I4I4I4I4I4BB", 0, 0, 0, 0, 0, 0, TOMBSTONE, 0))
  end
  return { "UNKNOWN" }
end

local epoch, slot, prefill, decode, matched, prompt, stage, length, at = struct.unpack(">I4I4I4I4I4I4BB", lease)
if stage > STARTED or (stage == STARTED and outcome == "started") then return { "SAME" } end
call("HDEL", lease_key, id)
if outcome == "started" or outcome == "finished" then
  if stage == BOOKED then mirror(lease) end
end
-- Blocks are reported in order, so the deepest checkpoint speaks for all: what is confirmed needs no credit, and must
-- have none, or an eviction that follows would go unseen.
local deepest = #lease >= at + length and lease:sub(-8)
local unreported = outcome == "finished" and deepest
  and call("SISMEMBER", prefix .. "b:" .. deepest, string.format("%d", slot)) == 0
local keep = outcome == "started" and STARTED or unreported and LINGERING
if outcome == "started" then
  lease_over.add(lease:sub(at, at + length - 1), epoch, -prefill, decode, 0)
else
  lease_over.load(lease)
end
if keep then
  local head = struct.pack(">I4I4I4I4I4I4BB", epoch, slot, 0, decode, matched, prompt, keep, length)
  call("HSET", lease_key, id, head .. lease:sub(at))
  if keep == LINGERING then call("ZADD", leases_key, now + linger_ms, id) end
else
  lease_over.forget(id)
  lease_over.speculation(id, lease)
end
reap()
return { keep == STARTED and "STARTED" or "SETTLED" }
