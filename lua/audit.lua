--[[
audit: compares the blocks that the index has for a worker's live slot with the worker's `digest` (their number and two
sums of their hashes). Each call compares a bounded piece; a walk is all pieces of one worker. A worker's further sets
of blocks (shared/further_sets) are audited like workers of their own, by their names in `sets`; but none that has no
digest, because nothing was reported of it, or because it is a store that several engines read.

Guarantee: no false alarm, whatever is applied between calls. Each piece checks what is true between any two calls:
each hash of s:<slot> has the slot in b:<hash>, and s:<slot> has as many members as the digest counts. To compare the
sums, a walk over all pieces is needed. A difference of sums counts if the digest was the same at each piece (else the
walk is repeated: three walks at most) and if a second walk finds the same difference. Then the worker waits for a
snapshot (all its blocks sent anew), and its digest is falsified, so that until then no heartbeat's is equal. The fleet
has one walk at a time, and one piece in min_gap_ms; each worker's turn comes every period_ms. Not noticed is a
slot that stands in b:<hash> although s:<slot> lacks the hash.

ARGV: prefix, max_blocks, period_ms, min_gap_ms
Returns: {blocks that were compared, 1 if a difference was found, 1 if a walk is under way}
Cost: O(max_blocks), 0.3 ms at 128 (0.5 at most); O(workers) after a worker joined or was forgotten
Keys that depend on data: b:<hash>, e:<hash>, s:<slot>
--]]
local workers_key, load_key, digest_key, resync_key, counts_key, audit_key, audit_walk_key, sets_key = unpack(KEYS)
local prefix, max_blocks, period_ms, min_gap_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local DIGEST_COUNT, HASH_BYTES = ">I4", 8
local WALKS = 3

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

if not max_blocks or not period_ms or not min_gap_ms or max_blocks < 1 then
  return redis.error_reply("BAD_ARGUMENT audit needs max_blocks, period_ms and min_gap_ms")
end

-- Add new workers, whose first audit is due period_ms from now, and remove forgotten ones.
local function enlist()
  local known = {}
  for _, key in ipairs({ workers_key, sets_key }) do
    for _, name in ipairs(call("HKEYS", key)) do
      known[name] = true
      call("ZADD", audit_key, "NX", now + period_ms, name)
    end
  end
  for _, worker in ipairs(call("ZRANGE", audit_key, 0, -1)) do
    if not known[worker] then call("ZREM", audit_key, worker) end
  end
end

local function finish(name, counter)
  call("UNLINK", audit_walk_key)
  call("ZADD", audit_key, "XX", now + period_ms, name)
  if counter then call("HINCRBY", counts_key, counter, 1) end
end

local function start(walk, slot, digest)
  walk.slot, walk.digest, walk.cursor, walk.moved = slot, digest, "0", false
  walk.count, walk.high, walk.low, walk.walks = 0, 0, 0, walk.walks + 1
end

local function alarm(name, worker, digest)
  local count, high, low = struct.unpack(DIGEST_SUMS, digest)
  call("HSET", digest_key, name, struct.pack(DIGEST_SUMS, count, (high + 1) % U32, low))
  call("ZADD", resync_key, "NX", -now, worker)
  local record = cjson.decode(call("HGET", workers_key, worker))
  local truth = record.truth or {}
  if not truth.cause or truth.cause == "join" then
    record.truth, truth.cause, truth.found = truth, "audit", (truth.found or 0) + 1
    call("HSET", workers_key, worker, cjson.encode(record))
  end
  finish(name, "audit_mismatch")
end

-- Compares one piece; returns true if this piece alone shows a difference.
local function piece(walk, slot, digest, is_ends)
  local members, forward = prefix .. "s:" .. slot .. (is_ends and ":e" or ""), prefix .. (is_ends and "e:" or "b:")
  local page, high, low = call("SSCAN", members, walk.cursor, "COUNT", max_blocks), 0, 0
  for _, hash in ipairs(page[2]) do
    if #hash ~= HASH_BYTES or call("SISMEMBER", forward .. hash, slot) == 0 then return true end
    local left, right = struct.unpack(HASH_HALVES, hash)
    high, low = high + left, low + right
  end
  walk.cursor, walk.count = page[1], walk.count + #page[2]
  walk.high, walk.low = (walk.high + high) % U32, (walk.low + low) % U32
  walk.moved = walk.moved or digest ~= walk.digest
  return call("SCARD", members) ~= struct.unpack(DIGEST_COUNT, digest)
end

-- Return the difference between the digest and the sums of a whole walk, as text; nil if they are equal.
local function difference(walk, digest)
  local count, high, low = struct.unpack(DIGEST_SUMS, digest)
  if count == walk.count and high == walk.high and low == walk.low then return nil end
  return string.format("%.0f %.0f %.0f", count - walk.count, (high - walk.high) % U32, (low - walk.low) % U32)
end

local saved = call("GET", audit_walk_key)
local walk = saved and cmsgpack.unpack(saved)
if walk and now - walk.at >= 0 and now - walk.at < min_gap_ms then return { 0, 0, 1 } end
if not walk then
  if call("ZCARD", audit_key) ~= call("HLEN", workers_key) + call("HLEN", sets_key) then enlist() end
  local due = call("ZRANGEBYSCORE", audit_key, "-inf", now, "LIMIT", 0, 1)[1]
  if not due then return { 0, 0, 0 } end
  walk = { worker = due, walks = 0, suspect = "" }
end

local name = walk.worker
local worker, kind = name:match("^([^:]*):?(.*)$")
local row, set = call("HGET", load_key, worker), kind ~= "" and call("HGET", sets_key, name)
if not row or not call("HGET", workers_key, worker) or kind ~= "" and not set then
  call("UNLINK", audit_walk_key)
  call("ZREM", audit_key, name)
  return { 0, 0, 0 }
end
local number, flags = struct.unpack(ROW_SLOT_TO_FLAGS, row, SLOT_AT)
if set then number = struct.unpack(FURTHER_SET, set) end
local slot, digest = string.format("%d", number), call("HGET", digest_key, name) or ("\0"):rep(DIGEST_BYTES)
if walk.walks == 0 then start(walk, slot, digest) end
-- End the walk if the worker is approximate, has another slot than the walk began with, or waits for a snapshot.
if bit.band(flags, FLAG_APPROXIMATE) ~= 0 or walk.slot ~= slot or call("ZSCORE", resync_key, worker)
  or set and call("HEXISTS", digest_key, name) == 0 then
  finish(name)
  return { 0, 0, 0 }
end

local before = walk.count
if piece(walk, slot, digest, kind == "ends") then
  alarm(name, worker, digest)
  return { 0, 1, 0 }
end
local blocks = walk.count - before
walk.at = now
if walk.cursor == "0" then
  local off = not walk.moved and difference(walk, digest)
  if off and off == walk.suspect then
    alarm(name, worker, digest)
    return { blocks, 1, 0 }
  end
  if (off or walk.moved) and walk.walks < WALKS then
    walk.suspect = off or walk.suspect
    start(walk, slot, digest)
  else
    finish(name, (off or walk.moved) and "audit_moved" or nil)
    return { blocks, 0, 0 }
  end
end
call("SET", audit_walk_key, cmsgpack.pack(walk))
return { blocks, 0, 1 }
