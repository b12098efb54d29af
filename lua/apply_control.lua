--[[
apply_control: applies the entries of one worker's stream that decide who the worker is and which slots it has: join,
begin, end, cleared, cleared.<kind> (of a further set) and leave. It also handles a stream that breaks the rules. It
stops before an entry that apply handles.

Guarantee: each entry is applied exactly once, as by apply. The latest join says who the worker is. A cleared cache, a
restart and a finished snapshot rewrite no entries of the index: they give the worker another slot and retire the old
one, so that readers see the old state or the new one, never a mixture. A stream of a wrong type, or with an id in the
far future, is deleted, and its worker has the flag HOSTILE until it joins anew.

ARGV: prefix, worker_id, max_entries, ttl_ms
Returns: {entries that were applied, 0, next}; next: 0 NOTHING (the stream is empty), 1 APPLY (call apply)
Cost: O(max_entries), no blocks are touched
Keys that depend on data: events:<worker_id>, command:<worker_id>, running:<worker_id>
--]]
local workers_key, load_key, alive_key, alive_servers_key, cursor_key, batch_key, digest_key, next_slot_key,
  resync_key, retired_key, counts_key, servers_key, sets_key, tiers_key, stores_key = unpack(KEYS)
local prefix, worker_id, max_entries, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local stream = "events:" .. worker_id
local stream_key, command_key = prefix .. stream, prefix .. "command:" .. worker_id
local running_key = prefix .. "running:" .. worker_id
local JSON_BYTES = 4096

local call = redis.call
local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local raw, packed = call("HGET", workers_key, worker_id), call("HGET", load_key, worker_id)
local row = packed and { struct.unpack(ROW, packed) }
local record = row and raw and cjson.decode(raw) or nil
local truth = record and record.truth or {}
local last = tonumber(call("HGET", batch_key, worker_id) or "0")
local command = cjson.decode(call("GET", command_key) or "{}")

local entry_of, resync = include "shared/stream_entry", include "shared/resync"
local announced, snapshot = include "apply_control/worker_join", include "apply_control/snapshot"
local heard, misnamed = include "shared/heard", include "shared/misnamed"
local drop_shadow, diverged, ask_resync = resync(resync_key, retired_key, digest_key, worker_id, now, truth, {})
local kinds, retire_set, drop_sets, publish_sets =
  (include "shared/further_sets")({ sets_key, tiers_key, retired_key, digest_key, stores_key }, worker_id)
local function count(name) call("HINCRBY", counts_key, name, 1) end
local function lost(cause) count(cause) ask_resync(record, cause) end
local begin, finish =
  snapshot(digest_key, next_slot_key, resync_key, retired_key, worker_id, now, truth, count, lost, drop_shadow)

local function parse(data)
  if #data > JSON_BYTES or data:sub(1, 1) ~= "{" then return {} end
  local ok, value = pcall(cjson.decode, data)
  return ok and value or {}
end

local function new_slot()
  drop_shadow(record)
  if row[SLOT_FIELD] > 0 then call("SADD", retired_key, row[SLOT_FIELD]) end
  row[SLOT_FIELD] = call("INCR", next_slot_key)
  record.slot = row[SLOT_FIELD]
  call("HDEL", digest_key, worker_id)
end

-- Return the slot of a set of a new worker. A store may have one already.
local function slot_of(set)
  local slot = set.store and tonumber(call("HGET", stores_key, set.store) or nil) or call("INCR", next_slot_key)
  if set.store then call("HSET", stores_key, set.store, slot) end
  return slot
end

local function demand_rejoin(reason)
  count(reason)
  if not record then return end
  drop_shadow(record)
  diverged("rejoin")
  record.rejoin = true
  command.id, command["do"] = redis.sha1hex(worker_id .. clock[1] .. clock[2]):sub(1, 8), "rejoin"
end

-- The worker gets a new slot and must be probed anew. Its booked load stays, because its reservations are still open.
local function join(data, time, nonce, batch, id)
  local fresh = announced(parse(data), worker_id, kinds)
  if not fresh then return count("malformed") end
  local same_process = record and record.nonce == nonce -- was told to join again: its cache is not empty
  if record then drop_shadow(record) end
  if record then drop_sets(record, fresh.sets) end
  local server_score = call("ZSCORE", alive_servers_key, fresh.server_id)
  local flags = (heard(server_score, now, ttl_ms) and FLAG_SERVER or 0) + (fresh.closed and FLAG_CLOSED or 0)
    + (fresh.sets and FLAG_SETS or 0)
  if row then flags = flags + bit.band(row[FLAGS_FIELD], FLAG_DRAINING) end -- only the operator ends draining
  local server = cjson.decode(call("HGET", servers_key, fresh.server_id) or "null")
  if server ~= cjson.null and misnamed(load_key, server.models, server.facts) then flags = flags + FLAG_MISNAMED end
  row = row or { call("INCR", next_slot_key), 0, 0, 0, 0 } -- a new epoch, which no earlier lease names
  for field = FLAGS_FIELD, ROW_FIELDS do row[field] = 0 end
  row[FLAGS_FIELD], row[SCHEME_FIELD], row[CAPACITY_BLOCKS_FIELD] = flags, fresh.scheme_id, fresh.capacity_blocks
  record, command, last = fresh, { joined = id }, batch -- `joined` tells an earlier process that it was replaced
  record.nonce, record.joined, truth.cause = nonce, tonumber(id:match("^%d+")), truth.cause or "join"
  new_slot()
  for _, set in pairs(record.sets or {}) do set.slot = slot_of(set) end
  call("ZADD", alive_key, time, worker_id)
  call("ZREM", resync_key, worker_id)
  if not fresh.ends then call("UNLINK", running_key) end -- else a list of the reservations that it has follows
  if same_process then ask_resync(record, "rejoin") end
end

local control = {} -- the operations, for entries of the current nonce
function control.join() record.left = nil end -- a repeated join changes no other field of the record
function control.cleared()
  if record.shadow then call("ZREM", resync_key, worker_id) end
  new_slot()
end
function control.leave()
  call("ZREM", alive_key, worker_id)
  record.left = true
  row[FLAGS_FIELD] = bit.band(row[FLAGS_FIELD], bit.bnot(FLAG_UNHEARD)) -- no replica keeps it routable now (vouch)
  record.listing = nil
end
function control.begin(data) begin(record, command, parse(data)) end
control["end"] = function(data) finish(record, row, parse(data)) end

-- The operation of this name; nil if apply handles it.
local function operation(name)
  local kind = name:match("^cleared%.(%l+)$")
  local set = kind and record.sets and record.sets[kind]
  if not set then return control[name] end
  return function()
    if set.store then return count("malformed") end -- one engine cannot tell that a store is empty
    retire_set(kind, set)
    set.slot = call("INCR", next_slot_key)
  end
end

-- Applies one entry; returns "stop" for an entry that apply handles. The batch number of the entry tells whether
-- entries before it were lost, or whether it was applied before.
local function enter(fields, good, time, id)
  local nonce, batch, name, data = fields[2], fields[4], fields[6], fields[8]
  local mine = good and record and not record.rejoin and nonce == record.nonce
  local act = mine and operation(name)
  if mine and not act then return "stop" end
  if not good then return count("malformed") end
  batch = tonumber(batch)
  local owes = mine and name == "leave" and record.ends and batch > last and call("EXISTS", running_key) == 1
  if owes then return "stop" end -- apply first gives back what the worker had
  if name == "join" and not mine then return join(data, time, nonce, batch, id) end
  if not mine then return count("nonce") end
  if batch <= last then return count("duplicate") end
  if batch ~= last + 1 then lost("gap") end
  last = batch
  act(data)
end

call("ZREM", resync_key, "") -- a no-op as first write: a full Redis then allows the script's other writes
local kind = call("TYPE", stream_key).ok
local cursor = call("HGET", cursor_key, stream) or "0-0"
local entries, following, hostile = 0, NEXT_NOTHING, kind ~= "stream" and kind ~= "none"
local page = kind == "stream" and call("XRANGE", stream_key, "-", "+", "COUNT", max_entries) or {}
local ms, sequence = cursor:match("^(%d+)-(%d+)$")
for at, item in ipairs(page) do
  local id_ms, id_sequence, good
  id_ms, id_sequence, hostile, good = entry_of(item, now)
  if hostile then break end
  -- Applied entries are trimmed. A first entry at or before the cursor shows that the stream began anew.
  if at == 1 and (id_ms < tonumber(ms) or id_ms == tonumber(ms) and id_sequence <= tonumber(sequence)) then
    demand_rejoin("regress")
  end
  if enter(item[2], good, math.min(id_ms, now), item[1]) == "stop" then
    following = NEXT_APPLY
    break
  end
  ms, sequence, cursor, entries = id_ms, id_sequence, item[1], entries + 1
end
if #page == max_entries then following = NEXT_APPLY end

if hostile then
  demand_rejoin("hostile")
  call("UNLINK", stream_key)
  if row then row[FLAGS_FIELD] = bit.bor(row[FLAGS_FIELD], FLAG_HOSTILE) end
  cursor, following = "0-0", NEXT_NOTHING
elseif entries > 0 then
  call("XTRIM", stream_key, "MINID", string.format("%.0f-%.0f", ms, sequence + 1))
end
if record then
  record.truth = truth
  call("HSET", cursor_key, stream, cursor)
  call("HSET", load_key, worker_id, struct.pack(ROW, unpack(row, 1, ROW_FIELDS)) .. worker_id)
  call("HSET", workers_key, worker_id, cjson.encode(record))
  call("HSET", batch_key, worker_id, last)
  publish_sets(record, row[SLOT_FIELD])
  command.nonce, command.applied = record.nonce, last
  call("SET", command_key, cjson.encode(command))
elseif following == NEXT_NOTHING then -- no worker has joined: the writer's next XADD finds no stream, so it joins again
  call("UNLINK", stream_key)
  call("HDEL", cursor_key, stream)
else
  call("HSET", cursor_key, stream, cursor)
end
return { entries, 0, following }
