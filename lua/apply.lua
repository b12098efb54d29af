--[[
apply: applies the next entries of one worker's stream to the index: stored, removed, chunk, heartbeat, progress,
digests, image, ended, running and tally, in the order of the stream. It stops before an entry for apply_control: one
that changes the worker's slots, or one that shows that the stream was made anew or breaks the rules.

Guarantee: each entry is applied exactly once, whichever replicas call apply and however often: the call that applies
an entry also moves the cursor and trims the entry. A tally or leave that ends more reservations than one call may end
stays in the stream until a later call has ended the last. A stream changes only the slots, the record, the row and the
leases of its own worker, the blocks of the stores that it reads, and the pool's reports of images. While Redis is short
of memory (tick decides that) no block is inserted, no digest is compared and no image is reported; a worker whose
blocks were left out is PARTIAL until the index equals its engine's block table again.

ARGV: prefix, worker_id, max_blocks (an entry counts as its bytes / 8, one of apply/reservations as its price)
Returns: {entries that were applied, block hashes in these entries, next, suspect}
      next: 0 NOTHING (the stream is empty), 1 APPLY (call apply again), 2 CONTROL (call apply_control)
      suspect: 1 if this call found a sign that the engine hashes otherwise, so that a probe is due (apply/progress)
Cost: O(max_blocks), 0.3-0.45 ms cold at 128; with an entry of apply/reservations up to 2 ms
Keys that depend on data: events:<worker_id>, command:<worker_id>, probe:<worker_id>, running:<worker_id>, b:<hash>,
      e:<hash>, s:<slot>, x:<hash>, c:<slot>:<id>, client:<tag>, tokens:<tag>, told_images:<worker_id>
--]]
local workers_key, load_key, alive_key, cursor_key, batch_key, digest_key, resync_key, retired_key, lease_key,
  counts_key, tick_key, sets_key, tiers_key, stores_key, images_key, servers_key = unpack(KEYS)
local prefix, worker_id, max_blocks = ARGV[1], ARGV[2], tonumber(ARGV[3])
local stream, shadow_name = "events:" .. worker_id, "~" .. worker_id
local stream_key, command_key = prefix .. stream, prefix .. "command:" .. worker_id
local probe_key = prefix .. "probe:" .. worker_id
local MOST_OVER_TYPICAL, MOST_BLOCKS = 4, 2 ^ 21 -- bounds of a claimed cache: times the fleet's median; blocks
local BEAT_FIELDS, BEAT_FIELDS_WITH_DIGEST, CHECKED_EVERY_MS = 7, 10, 1000
local PAGE, LIST_BYTES = 8, 16384
local STEP_CHANGE = 4 -- the time of an engine step is stored again if it changed by more than 1/STEP_CHANGE
local CONTROL = { join = true, cleared = true, begin = true, ["end"] = true, leave = true }

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local raw, packed = call("HGET", workers_key, worker_id), call("HGET", load_key, worker_id)
local record = raw and packed and cjson.decode(raw)
if not record or record.rejoin or call("TYPE", stream_key).ok ~= "stream" then return { 0, 0, NEXT_CONTROL, 0 } end
call("ZREM", resync_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
local ticked = call("GET", tick_key) or ""
local short, typical_blocks = ticked:match("^%d+ %d+ %d+ %d+ [1-9]") ~= nil, ticked:match("^%d+ %d+ %d+ %d+ %d+ (%d+)")
local row = { struct.unpack(ROW, packed) }
local last = tonumber(call("HGET", batch_key, worker_id) or "0")
local sums = call("HMGET", digest_key, worker_id, shadow_name)
local live = { struct.unpack(DIGEST_SUMS, sums[1] or string.rep("\0", DIGEST_BYTES)) }
local shadow = { struct.unpack(DIGEST_SUMS, sums[2] or string.rep("\0", DIGEST_BYTES)) }
local truth, changed = record.truth or {}, {}
record.truth = truth
-- The worker's records in Redis, read above. The parts (apply/*) read and change this table, and mark in `changed`
-- which of its records the end of this script writes back to Redis.
local state = { prefix = prefix, worker = worker_id, record = record, row = row, live = live, shadow = shadow,
  truth = truth, changed = changed, short = short, probed = call("TYPE", probe_key).ok == "set",
  blocks = 0, seen = nil }

-- Bound the capacity, because a worker that claims an endless cache, or none, would look empty for ever.
local typical, capacity = tonumber(typical_blocks) or 0, math.min(record.capacity_blocks, MOST_BLOCKS)
if typical > 0 then capacity = capacity == 0 and typical or math.min(capacity, MOST_OVER_TYPICAL * typical) end
if capacity ~= row[CAPACITY_BLOCKS_FIELD] then row[CAPACITY_BLOCKS_FIELD], changed.row = capacity, true end

local entry_of, resync = include "shared/stream_entry", include "shared/resync"
local _, _, ask_resync = resync(resync_key, retired_key, digest_key, worker_id, now, truth, changed)
local function count(name, number) call("HINCRBY", counts_key, name, number or 1) end
local function lost(cause) count(cause) ask_resync(record, cause) end

local function integers(list, first)
  for at = first, #list do
    local value = list[at]
    if type(value) ~= "number" or value < 0 or value >= U32 or value ~= math.floor(value) then return false end
  end
  return true
end

local function parse_list(data)
  if #data > LIST_BYTES or data:sub(1, 1) ~= "[" then return nil end
  local ok, list = pcall(cjson.decode, data)
  return ok and list or nil
end

local operation = {} -- name -> function(data, time in ms), which returns false if the data is malformed
local add_block_events, add_progress = include "apply/block_events", include "apply/progress"
local give_back = (include "apply/give_back")(state)
local change, room = add_block_events(state, operation, count, lost)
local confirm, reopen, leave, price
if record.ends then
  confirm, reopen, leave, price =
    (include "apply/reservations")(state, operation, lease_key, now, give_back, count, parse_list, integers)
end
add_progress(state, operation, lease_key, give_back, count, parse_list, integers, confirm, reopen);
(include "apply/images")(state, operation, images_key, servers_key, clock, count, parse_list, integers)
local write_sets = record.sets and (include "apply/further_sets")(state, operation, CONTROL,
  { sets_key, tiers_key, retired_key, digest_key, stores_key }, count, ask_resync, integers, change, room)

function operation.heartbeat(data, time)
  local beat = parse_list(data)
  if not beat or not integers(beat, 1) then return false end
  -- One field (1: the engine is paused) may follow, or two: whether it is paused (0 or 1), and its shortest step in us.
  local known = #beat < BEAT_FIELDS_WITH_DIGEST and BEAT_FIELDS or BEAT_FIELDS_WITH_DIGEST
  local paused, step_us = beat[known + 1] == 1, beat[known + 2] or 0
  if #beat < known or #beat > known + 2 or #beat == known + 1 and not paused then return false end
  local _, _, blocks, foreign_prefill, foreign_decode, speed, evicted, digest_count, high, low = unpack(beat, 1, known)
  -- A small change leaves the record as it is, because replicas read every record that has changed.
  if STEP_CHANGE * math.abs(step_us - (record.step_us or 0)) > step_us then
    record.step_us, changed.record = step_us, true
  end
  state.seen, changed.row = time, true
  local flags = bit.band(row[FLAGS_FIELD], bit.bnot(FLAG_PAUSED))
  row[FLAGS_FIELD] = paused and flags + FLAG_PAUSED or flags
  row[FOREIGN_PREFILL_TOKENS_FIELD], row[FOREIGN_DECODE_TOKENS_FIELD] = foreign_prefill, foreign_decode
  row[BLOCKS_FIELD] = math.max(blocks, live[1]) -- at least the number that the index has
  row[EVICTED_FIELD] = math.min(evicted, MAX_EVICTED)
  if speed > 0 then
    row[SPEED_TPS_FIELD], row[FLAGS_FIELD] = speed, bit.band(row[FLAGS_FIELD], bit.bnot(FLAG_LEARNED))
  end
  if not digest_count or record.shadow or short then return true end
  if math.abs(time - (truth.checked or 0)) >= CHECKED_EVERY_MS then truth.checked, changed.record = time, true end
  local whole = bit.band(row[FLAGS_FIELD], bit.bnot(FLAG_PARTIAL))
  if digest_count ~= live[1] or high ~= live[2] or low ~= live[3] then
    if row[FLAGS_FIELD] == whole then count("mismatch") end
    ask_resync(record, "digest")
  else
    row[FLAGS_FIELD] = whole
    -- The digest is right, so the worker needs no snapshot, unless a further set differs (apply/further_sets).
    local waits = record.differs and 1 or tonumber(call("ZSCORE", resync_key, worker_id) or "0")
    if waits < 0 then call("ZREM", resync_key, worker_id) end
    if waits <= 0 and truth.cause then truth.cause, truth.healed, changed.record = nil, truth.found, true end
  end
end

-- Applies an entry of the worker's current process. Its batch number shows whether entries before it were lost, or
-- whether it was applied before. Returns true if the entry must be applied again.
local function apply(batch, name, data, time)
  if batch <= last then return count("duplicate") end
  if batch ~= last + 1 then lost("gap") end
  last = batch
  local act, result = operation[name], false
  if act then result = act(data, time) end
  if result == false then count("malformed") end
  if result ~= "unfinished" then return end
  last = batch - 1
  return true
end

-- Applied entries are trimmed. A first entry at or before the cursor shows that the stream was deleted and made anew.
local cursor = call("HGET", cursor_key, stream) or "0-0"
local ms, sequence = cursor:match("^(%d+)-(%d+)$")
ms, sequence = tonumber(ms), tonumber(sequence)
local entries, spent = 0, 0 -- entries that were applied; blocks that they count as
local from, want = "-", 1 -- read one entry first: a full batch of blocks is all that one call may apply
local full, control = false, false -- whether no further entry fits into this call; whether the next is apply_control's
local unfinished = false -- whether the next entry was applied in part, and stays in the stream
repeat
  local page = call("XRANGE", stream_key, from, "+", "COUNT", want)
  for _, item in ipairs(page) do
    local fields, id_ms, id_sequence, hostile, good = item[2], entry_of(item, now)
    local ahead = id_ms > ms or (id_ms == ms and id_sequence > sequence)
    local mine = fields[2] == record.nonce
    local bytes = #(fields[8] or "")
    local cost = math.max(4, math.min(max_blocks, price and price(fields[6], bytes) or bytes / 8))
    control = not ahead or hostile or (good and (fields[6] == "join" or mine) and CONTROL[fields[6]])
    full = spent > 0 and spent + cost > max_blocks
    if leave and control and ahead and not hostile and mine and fields[6] == "leave" and tonumber(fields[4]) > last then
      unfinished = not full and leave() ~= nil
      control = not full and not unfinished
    elseif not control and not full then
      if not good or not mine then
        count(good and "nonce" or "malformed")
      else
        unfinished = apply(tonumber(fields[4]), fields[6], fields[8], math.min(id_ms, now)) == true
      end
    end
    full = full or unfinished
    if control or full then break end
    -- Only from here on the entry counts as applied: everything up to the cursor is trimmed at the end of this call.
    ms, sequence, cursor, spent, entries = id_ms, id_sequence, item[1], spent + cost, entries + 1
  end
  full, from, want = full or #page < want or spent >= max_blocks, "(" .. cursor, PAGE
until control or full

if entries > 0 or changed.row or unfinished then
  call("HSET", cursor_key, stream, cursor)
  call("XTRIM", stream_key, "MINID", string.format("%.0f-%.0f", ms, sequence + 1))
  if state.seen then call("ZADD", alive_key, state.seen, worker_id) end
  if changed.live then call("HSET", digest_key, worker_id, struct.pack(DIGEST_SUMS, live[1], live[2], live[3])) end
  if changed.shadow then
    call("HSET", digest_key, shadow_name, struct.pack(DIGEST_SUMS, shadow[1], shadow[2], shadow[3]))
    call("ZADD", resync_key, "XX", now, worker_id)
  end
  if write_sets then write_sets() end
  if changed.row then call("HSET", load_key, worker_id, struct.pack(ROW, unpack(row, 1, ROW_FIELDS)) .. worker_id) end
  if changed.record then call("HSET", workers_key, worker_id, cjson.encode(record)) end
  call("HSET", batch_key, worker_id, last)
  local command = cjson.decode(call("GET", command_key) or "{}")
  command.nonce, command.applied = record.nonce, last
  if state.lists == "begun" and command["do"] == "list" then command.id, command["do"] = nil, nil end
  if state.lists == "asked" and (not command.id or command["do"] == "list") then
    command.id, command["do"] = redis.sha1hex(worker_id .. clock[1] .. clock[2]):sub(1, 8), "list"
  end
  call("SET", command_key, cjson.encode(command))
end
local following = control and NEXT_CONTROL
  or call("XLEN", stream_key) > 0 and NEXT_APPLY or NEXT_NOTHING
return { entries, state.blocks, following, changed.suspect or 0 }
