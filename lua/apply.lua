--[[
apply: what one worker's stream says inside its slots: stored, removed, chunk, heartbeat, progress, in stream order.
Stops before an entry that decides which slots those are, or that needs a verdict on the stream: apply_control's work.

Guarantee: exactly once, whoever calls and how often: the cursor moves and what was applied is trimmed in this same
call. A stream changes only its own worker's slots, record, row and leases. While memory is short (tick says so) nothing
is inserted and no digest compared; the row is PARTIAL until the index equals the engine's table again.

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
local BLOCK, HELD, PROBE = PREFIX .. "b:", PREFIX .. "s:", PREFIX .. "probe:" .. WORKER
local ROW, LEASE_HEAD, LEASE_BYTES = ">I4i4i4i4I4I2I4I4I4I4I4I4I4", ">I4I4I4I4I4I4BB", 26
local NO_LEASE = ("\0"):rep(LEASE_BYTES)
local EPOCH, PREFILL, DECODE, SLOT, FLAGS, CAPACITY, PARTIAL, PROVEN = 1, 2, 3, 5, 6, 12, 64, 4 -- of the row; two flags
local BATCH_BLOCKS, PROGRESS_ITEMS, PAGE, TOMBSTONE, JSON_BYTES = 128, 64, 8, 3, 16384
local FAR_FUTURE_MS, LAST_SEQUENCE, U32 = 3600000, 2 ^ 52, 2 ^ 32 -- for ids: see apply_control
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
local changed, blocks, seen = {}, 0, nil
local truth, probed = record.truth or {}, call("TYPE", PROBE).ok == "set"
record.truth = truth

local function count(name) call("HINCRBY", COUNTS, name, 1) end

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

-- Wait for a snapshot from now on. One already commanded keeps its turn, unless it had begun and is now spoilt.
local function ask_resync(cause)
  if not truth.cause or truth.cause == "join" then
    truth.cause, truth.found, changed.record = cause, (truth.found or 0) + 1, true
  end
  if record.shadow then
    call("SADD", RETIRED, record.shadow)
    call("HDEL", DIGEST, SHADOW)
    record.shadow, record.snapshot, changed.record, changed.shadow = nil, nil, true, false
    call("ZADD", RESYNC, -now, WORKER)
  else
    call("ZADD", RESYNC, "NX", -now, WORKER)
  end
end
local function lost(cause) count(cause) ask_resync(cause) end

-- Write (SADD, sign 1) or erase (SREM, sign -1) packed hashes from `first` on. Only a real change moves the digest.
local function change(verb, sign, data, first, slot, digest)
  local hashes, n, high, low = {}, 0, 0, 0
  slot = string.format("%d", slot) -- once, not at every call
  for at = first, #data, 8 do
    local hash = data:sub(at, at + 7)
    if call(verb, BLOCK .. hash, slot) == 1 then
      local left, right = struct.unpack(">I4I4", hash)
      n, high, low = n + 1, high + left, low + right
      hashes[n] = hash
    end
  end
  if n > 0 then call(verb, HELD .. slot, unpack(hashes)) end
  if n > 0 and sign > 0 and probed then call("SREM", PROBE, unpack(hashes)) end -- told, though it may be evicted next
  digest[1], digest[2] = digest[1] + sign * n, (digest[2] + sign * high) % U32
  digest[3] = (digest[3] + sign * low) % U32
  blocks = blocks + (#data - first + 1) / 8
end

local function packed_hashes(bytes) return bytes >= 0 and bytes % 8 == 0 and bytes <= BATCH_BLOCKS * 8 end

-- An honest engine never holds more than its capacity; twice that (a batch may add before it removes) is the bound.
local function room(digest)
  if not short and digest[1] + BATCH_BLOCKS <= 2 * row[CAPACITY] + 8 * BATCH_BLOCKS then return true end
  if short then row[FLAGS], changed.row = bit.bor(row[FLAGS], PARTIAL), true end
  lost(short and "partial" or "overflow")
  return false
end

local function block_event(verb, sign, data)
  if not packed_hashes(#data) then return false end
  if record.shadow then -- a plugin sends these after `end`: what came so far is no longer one cut
    lost("interleaved")
  end
  if sign > 0 and not room(live) then return true end
  change(verb, sign, data, 1, row[SLOT], live)
  changed.live = true
end

local operation = {} -- name -> function(data, time in ms): false if the data is malformed
function operation.stored(data) return block_event("SADD", 1, data) end
function operation.removed(data) return block_event("SREM", -1, data) end

function operation.chunk(data, time)
  if not packed_hashes(#data - 8) then return false end
  seen = time -- its heartbeats wait behind many of these
  if not record.shadow or data:sub(1, 8) ~= record.snapshot then
    count("stale")
  elseif room(shadow) then
    change("SADD", 1, data, 9, record.shadow, shadow)
    changed.shadow = true
  end
end

function operation.heartbeat(data, time)
  local beat = parse_list(data)
  if not beat or (#beat ~= 7 and #beat ~= 10) or not integers(beat, 1) then return false end
  seen, changed.row = time, true
  row[9], row[10], row[11], row[13] = beat[4], beat[5], beat[3], beat[7]
  if beat[6] > 0 then row[8] = beat[6] end
  if #beat == 7 or record.shadow or short then return true end
  if math.abs(time - (truth.checked or 0)) >= 1000 then truth.checked, changed.record = time, true end
  local whole = bit.band(row[FLAGS], bit.bnot(PARTIAL))
  if beat[8] ~= live[1] or beat[9] ~= live[2] or beat[10] ~= live[3] then
    if row[FLAGS] == whole then count("mismatch") end
    ask_resync("digest")
  else
    row[FLAGS] = whole
    local waits = tonumber(call("ZSCORE", RESYNC, WORKER) or "0")
    if waits < 0 then call("ZREM", RESYNC, WORKER) end -- it lost no blocks
    if waits <= 0 and truth.cause then truth.cause, truth.healed, changed.record = nil, truth.found, true end
  end
end

-- Is this still the worker that was proved? Another prompt length says no; so does, twice running, a prompt whose last
-- block the index lacks: the engine has it, and tells of blocks first. Only a suspicion: a probe decides, not a tenant.
local function judge(same_prompt, hash)
  if bit.band(row[FLAGS], PROVEN + PARTIAL) ~= PROVEN or record.shadow or truth.cause or short then return end
  local before, held = record.strikes or 0, #hash == 8 and call("SISMEMBER", HELD .. row[SLOT], hash)
  local strikes = not held and before or held == 1 and 0 or math.min(2, before + 1)
  if strikes ~= before then record.strikes, changed.record = strikes, true end
  local why = not same_prompt and "prompt" or strikes == 2 and "blocks"
  if why then count("suspect_" .. why) end
  if why and not record.suspect then record.suspect, changed.record, changed.suspect = why, true, 1 end
end

-- Prefill of these is done: give its booking back as the first token would, and compare prediction with outcome. Of
-- several prompts (their id begins wf--) each gives back its share; the lease keeps what is left of both.
local function started(id, cached, prompt_tokens)
  local lease = call("HGET", LEASE, id)
  local epoch, slot, prefill, decode, matched, prompt, stage, length = struct.unpack(LEASE_HEAD, lease or NO_LEASE)
  if not lease or stage == TOMBSTONE then return count("late") end
  if lease:sub(LEASE_BYTES + 1, LEASE_BYTES + length) ~= WORKER then return count("foreign") end
  local mark, expected = id:sub(4, 4), prompt
  local several = mark == "-"
  if prompt > 0 and not several and mark ~= "_" then -- else renew rebuilt it, or nobody could foresee this prompt
    count(cached == matched and "exact" or cached > matched and "over" or "short")
    if prompt_tokens ~= prompt then count("prompt") end
    judge(prompt_tokens == prompt, call("GETRANGE", ("%sc:%d:%s"):format(PREFIX, slot, id), -8, -1))
    prompt = 0 -- once: a beam search goes on with longer prompts under the same id
  end
  if stage > 0 then -- the first byte was told before
    return prompt < expected and call("HSET", LEASE, id, lease:sub(1, 20) .. "\0\0\0\0" .. lease:sub(25))
  end
  local left = several and math.max(0, prompt - prompt_tokens) or 0
  local kept, done = math.floor(prefill * left / math.max(1, prompt)), left == 0 and 1 or 0
  if epoch == row[EPOCH] then
    row[PREFILL], row[DECODE], changed.row = row[PREFILL] - prefill + kept, row[DECODE] + done * decode, true
  end
  local head = struct.pack(LEASE_HEAD, epoch, slot, kept, decode, matched, several and left or prompt, done, length)
  call("HSET", LEASE, id, head .. lease:sub(LEASE_BYTES + 1))
end

function operation.progress(data)
  local list = parse_list(data)
  if not list or #list > PROGRESS_ITEMS then return false end
  for _, item in ipairs(list) do
    if type(item) ~= "table" or type(item[1]) ~= "string" or #item ~= 3 or not integers(item, 2) then return false end
  end
  for _, item in ipairs(list) do started(item[1], item[2], item[3]) end
end

local function well_formed(fields)
  return #fields == 8 and fields[1] == "n" and fields[3] == "b" and fields[5] == "o" and fields[7] == "d"
    and #fields[4] <= 14 and fields[4]:match("^%d+$")
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
    local fields, id_ms, id_sequence = item[2], item[1]:match("^(%d+)-(%d+)$")
    id_ms, id_sequence = tonumber(id_ms), tonumber(id_sequence)
    local ahead = id_ms > ms or (id_ms == ms and id_sequence > sequence)
    local good, mine = well_formed(fields), fields[2] == record.nonce
    local cost = math.max(4, math.min(MAX_BLOCKS, math.ceil(#(fields[8] or "") / 8)))
    control = not ahead or id_ms > now + FAR_FUTURE_MS or id_sequence > LAST_SEQUENCE
      or (good and (fields[6] == "join" or mine) and CONTROL[fields[6]])
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
  if seen then call("ZADD", ALIVE, seen, WORKER) end
  if changed.live then call("HSET", DIGEST, WORKER, struct.pack(">I4I4I4", live[1], live[2], live[3])) end
  if changed.shadow then
    call("HSET", DIGEST, SHADOW, struct.pack(">I4I4I4", shadow[1], shadow[2], shadow[3]))
    call("ZADD", RESYNC, "XX", now, WORKER)
  end
  if changed.row then call("HSET", LOAD, WORKER, struct.pack(ROW, unpack(row, 1, 13)) .. WORKER) end
  if changed.record then call("HSET", WORKERS, WORKER, cjson.encode(record)) end
  call("HSET", BATCH, WORKER, last)
  local command = cjson.decode(call("GET", COMMAND) or "{}")
  command.nonce, command.applied = record.nonce, last
  call("SET", COMMAND, cjson.encode(command))
end
return { entries, blocks, control and 2 or call("XLEN", STREAM) > 0 and 1 or 0, changed.suspect or 0 }
