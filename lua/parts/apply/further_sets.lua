--[[
apply/further_sets: the operations of a worker that has further sets of blocks (shared/further_sets), by kind:
`stored.<kind>` and `removed.<kind>`, which change a set, and `digests`, with which the engine tells what its sets are:
a JSON object of kind -> [count, high, low], and a fourth number if the engine has measured it: the picoseconds that
loading a byte from this tier takes. A difference makes the worker wait for a snapshot (shared/resync), which brings all
sets anew: behind the snapshot's end come `cleared.<kind>` (for apply_control) and `stored.<kind>`. A store that several
engines read is compared with nothing: any of them may change it. If it is full, other blocks make room.

Takes the state of apply (reads prefix, worker, record, row, short, changed), the table of operations, to which it adds
some, the set of operations for apply_control, to which it adds the others, a list of the keys sets, tiers, retired,
digest and stores, and the functions count(counter), ask_resync(record, cause), integers(list, first), change and room
(apply/block_events). Returns a function that writes what has changed; call it once all entries are applied.
--]]
local call = redis.call
local PACKED_BYTES, DIGESTS_BYTES = 1024, 1024
local MOST_SET_BLOCKS = 4194304 -- blocks that a further set may have, whatever the worker announced: 270 MB
local RATE_CHANGE = 4 -- the time to load a byte is stored again if it changed by more than 1/RATE_CHANGE
local further_sets = include "shared/further_sets"

return function(state, operation, control, keys, count, ask_resync, integers, change, room)
  local prefix, record, row, worker, changed = state.prefix, state.record, state.row, state.worker, state.changed
  local digest_key = keys[4]
  local kinds, _, _, publish = further_sets(keys, worker)
  local sums, written = {}, {} -- by kind: the digest of the set as it is in the index, once it is read; if it changed

  local function sums_of(kind)
    if record.sets[kind].store then -- only its size is known
      return { call("SCARD", prefix .. "s:" .. string.format("%d", record.sets[kind].slot)), 0, 0 }
    end
    if not sums[kind] then
      local packed = call("HGET", digest_key, worker .. ":" .. kind) or ("\0"):rep(DIGEST_BYTES)
      sums[kind] = { struct.unpack(DIGEST_SUMS, packed) }
    end
    return sums[kind]
  end

  -- Tell whether a store may get further blocks; drop some of its blocks if it is full. What is dropped and is still
  -- there comes back when an engine finds it.
  local function room_in_store(set, size, most)
    if size > most then
      local slot = string.format("%d", set.slot)
      for _, hash in ipairs(call("SPOP", prefix .. "s:" .. slot, BATCH_BLOCKS)) do
        call("SREM", prefix .. "b:" .. hash, slot)
      end
    end
    return not state.short
  end

  for kind, known in pairs(kinds) do
    local set = record.sets[kind]
    local capacity = set and (set.capacity_blocks or set.store and MOST_SET_BLOCKS or record.capacity_blocks)
    local most = set and math.min(capacity, MOST_SET_BLOCKS)
    local function event(verb, sign, data)
      if #data % 8 ~= 0 or #data > PACKED_BYTES then return false end
      local digest = sums_of(kind)
      if sign > 0 and set.store and not room_in_store(set, digest[1], most) then return true end
      if sign > 0 and not set.store and not room(digest, most) then return true end
      change(verb, sign, data, 1, set.slot, digest, known.forward, known.mark)
      written[kind] = not set.store or nil
    end
    if set then
      operation["stored." .. kind] = function(data) return event("SADD", 1, data) end
      operation["removed." .. kind] = function(data) return event("SREM", -1, data) end
      control["cleared." .. kind] = true
    end
  end

  -- Returns whether the set is as the engine says; nil if what it says is malformed. Notes the time to load a byte.
  local function compare(kind, set, told)
    if type(told) ~= "table" or #told < 3 or #told > 4 or not integers(told, 1) then return nil end
    local rate, before = told[4] or 0, set.ps_per_byte or 0
    if rate > 0 and RATE_CHANGE * math.abs(rate - before) > rate then
      set.ps_per_byte, changed.record, changed.sets = rate, true, true
    end
    if set.store then return true end
    local digest = sums_of(kind)
    return told[1] == digest[1] and told[2] == digest[2] and told[3] == digest[3]
  end

  function operation.digests(data)
    local ok, told = pcall(cjson.decode, data:sub(1, 1) == "{" and #data <= DIGESTS_BYTES and data or "")
    if not ok then return false end
    local same = true
    for kind in pairs(kinds) do
      local set = record.sets[kind]
      local as_told = not set or compare(kind, set, told[kind])
      if as_told == nil then return false end
      same = same and as_told
    end
    if record.shadow or state.short then return end
    if not same then
      if bit.band(row[FLAGS_FIELD], FLAG_PARTIAL) == 0 then count("mismatch") end
      ask_resync(record, "digest")
    end
    if (record.differs or false) == same then record.differs, changed.record = not same or nil, true end
  end

  return function()
    for kind in pairs(written) do
      call("HSET", digest_key, worker .. ":" .. kind, struct.pack(DIGEST_SUMS, unpack(sums[kind])))
    end
    if changed.sets then publish(record, row[SLOT_FIELD]) end
  end
end
