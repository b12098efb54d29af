--[[
apply: what one worker's stream says inside its slots: stored, removed, chunk, heartbeat, progress, in stream order.
Stops before an entry that decides which slots those are, or that needs a verdict on the stream: apply_control's work.

Guarantee: exactly once, whoever calls and how often: the cursor moves and what was applied is trimmed in this same
call. A stream changes only its own worker's slots, record, row and leases. While memory is short (tick says so) nothing
is inserted and no digest compared; the row is PARTIAL until the index equals the engine's table again.
Its parts: apply/block_events, apply/progress, and what others who apply need, too: shared/stream_entry, shared/resync.

KEYS: workers load alive cursor batch digest resync retired lease counts tick
ARGV: prefix, worker_id, max_blocks (an entry costs its bytes / 8)
Returns: {entries, blocks, next, suspect}; blocks = hashes read; next: 0 nothing left, 1 call again, 2 call
      apply_control; suspect: 1 = the worker has become suspected: a probe is due
Cost: O(max_blocks), 0.3-0.45 ms cold at 128
Keys that depend on data: events:<worker_id>, command:<worker_id>, probe:<worker_id>, b:<hash>, s:<slot>
--]]
local WORKERS, LOAD, ALIVE, CURSOR, BATCH = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local DIGEST, RESYNC, RETIRED, LEASE, COUNTS, TICK = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local PREFIX, WORKER, MAX_BLOCKS = ARGV[1], ARGV[2], tonumber(ARGV[3])
local FIELD, SHADOW = "events:" .. WORKER, "~" .. WORKER
local STREAM, COMMAND = PREFIX .. FIELD, PREFIX .. "command:" .. WORKER
local PROBE = PREFIX .. "probe:" .. WORKER
local ROW, FLAGS, PARTIAL = ">I4i4i4i4I4I2I4I4I4I4I4I4I4I4I4", 6, 64
local PAGE, JSON_BYTES, U32 = 8, 16384, 2 ^ 32
local CONTROL = { join = true, cleared = true, begin = true, ["end"] = true, leave = true }

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local raw, packed = call("HGET", WORKERS, WORKER), call("HGET", LOAD, WORKER)
local record = raw and packed and cjson.decode(raw)
if not record or record.rejoin or call("TYPE", STREAM).ok ~= "stream" then return { 0, 0, 2, 0 } end
call("ZREM", RESYNC, "") -- after a write that takes no memory, a full Redis allows the others
local short = (call("GET", TICK) or ""):match("^%d+ %d+ %d+ %d+ [1-9]") ~= nil
local row = { struct.unpack(ROW, packed) }
local last = tonumber(call("HGET", BATCH, WORKER) or "0")
local sums = call("HMGET", DIGEST, WORKER, SHADOW)
local live = { struct.unpack(">I4I4I4", sums[1] or string.rep("\0", 12)) }
local shadow = { struct.unpack(">I4I4I4", sums[2] or string.rep("\0", 12)) }
local truth, changed = record.truth or {}, {}
record.truth = truth
local of = { prefix = PREFIX, worker = WORKER, record = record, row = row, live = live, shadow = shadow, truth = truth,
  changed = changed, short = short, probed = call("TYPE", PROBE).ok == "set", blocks = 0, seen = nil }

local entry_of, resync = include "shared/stream_entry", include "shared/resync"
local _, _, ask_resync = resync(RESYNC, RETIRED, DIGEST, WORKER, now, truth, changed)
local function count(name) call("HINCRBY", COUNTS, name, 1) end
local function lost(cause) count(cause) ask_resync(record, cause) end

local function integers(list, first)
  for at = first, #list do
    local value = list[at]
    if type(value) ~= "number" or value < 0 or value >= U32 or value ~= math.floor(value) then return false end
  end
  return true
end

local function parse_list(data)
  if #data > JSON_BYTES or data:sub(1, 1) ~= "[" then return nil end
  local ok, list = pcall(cjson.decode, data)
  return ok and list or nil
end

local operation = {} -- name -> function(data, time in ms): false if the data is malformed
local blocks, progress = include "apply/block_events", include "apply/progress"
blocks(of, operation, count, lost)
progress(of, operation, LEASE, count, parse_list, integers)

function operation.heartbeat(data, time)
  local beat = parse_list(data)
  if not beat or (#beat ~= 7 and #beat ~= 10) or not integers(beat, 1) then return false end
  of.seen, changed.row = time, true
  row[9], row[10], row[11], row[13] = beat[4], beat[5], beat[3], beat[7]
  if beat[6] > 0 then row[8] = beat[6] end
  if #beat == 7 or record.shadow or short then return true end
  if math.abs(time - (truth.checked or 0)) >= 1000 then truth.checked, changed.record = time, true end
  local whole = bit.band(row[FLAGS], bit.bnot(PARTIAL))
  if beat[8] ~= live[1] or beat[9] ~= live[2] or beat[10] ~= live[3] then
    if row[FLAGS] == whole then count("mismatch") end
    ask_resync(record, "digest")
  else
    row[FLAGS] = whole
    local waits = tonumber(call("ZSCORE", RESYNC, WORKER) or "0")
    if waits < 0 then call("ZREM", RESYNC, WORKER) end -- it lost no blocks
    if waits <= 0 and truth.cause then truth.cause, truth.healed, changed.record = nil, truth.found, true end
  end
end

-- One entry of the current nonce. Batch numbers tell what was lost or came twice.
local function apply(batch, name, data, time)
  if batch <= last then return count("duplicate") end
  if batch ~= last + 1 then lost("gap") end
  last = batch
  if not operation[name] or operation[name](data, time) == false then count("malformed") end
end

-- What is applied is trimmed: a first entry at or before the cursor is a stream that began anew.
local cursor = call("HGET", CURSOR, FIELD) or "0-0"
local ms, sequence = cursor:match("^(%d+)-(%d+)$")
ms, sequence = tonumber(ms), tonumber(sequence)
local entries, spent, from, want, full, control = 0, 0, "-", 1, false, false
repeat -- one entry first: a full batch is all that a call may apply
  local page = call("XRANGE", STREAM, from, "+", "COUNT", want)
  for _, item in ipairs(page) do
    local fields, id_ms, id_sequence, hostile, good = item[2], entry_of(item, now)
    local ahead = id_ms > ms or (id_ms == ms and id_sequence > sequence)
    local mine = fields[2] == record.nonce
    local cost = math.max(4, math.min(MAX_BLOCKS, math.ceil(#(fields[8] or "") / 8)))
    control = not ahead or hostile or (good and (fields[6] == "join" or mine) and CONTROL[fields[6]])
    full = spent > 0 and spent + cost > MAX_BLOCKS
    if control or full then break end
    ms, sequence, cursor, spent, entries = id_ms, id_sequence, item[1], spent + cost, entries + 1
    if not good or not mine then
      count(good and "nonce" or "malformed")
    else
      apply(tonumber(fields[4]), fields[6], fields[8], math.min(id_ms, now))
    end
  end
  full, from, want = full or #page < want or spent >= MAX_BLOCKS, "(" .. cursor, PAGE
until control or full

if entries > 0 then
  call("HSET", CURSOR, FIELD, cursor)
  call("XTRIM", STREAM, "MINID", string.format("%.0f-%.0f", ms, sequence + 1))
  if of.seen then call("ZADD", ALIVE, of.seen, WORKER) end
  if changed.live then call("HSET", DIGEST, WORKER, struct.pack(">I4I4I4", live[1], live[2], live[3])) end
  if changed.shadow then
    call("HSET", DIGEST, SHADOW, struct.pack(">I4I4I4", shadow[1], shadow[2], shadow[3]))
    call("ZADD", RESYNC, "XX", now, WORKER)
  end
  if changed.row then call("HSET", LOAD, WORKER, struct.pack(ROW, unpack(row, 1, 15)) .. WORKER) end
  if changed.record then call("HSET", WORKERS, WORKER, cjson.encode(record)) end
  call("HSET", BATCH, WORKER, last)
  local command = cjson.decode(call("GET", COMMAND) or "{}")
  command.nonce, command.applied = record.nonce, last
  call("SET", COMMAND, cjson.encode(command))
end
return { entries, of.blocks, control and 2 or call("XLEN", STREAM) > 0 and 1 or 0, changed.suspect or 0 }
