--[[
shared/further_sets: the sets of blocks that a worker may report beside its main one, which is what routers match on
the GPU. Each has a slot of its own, which stands in the key `sets` and in the worker's record (`sets`, by kind).
  ends         blocks at which all KV cache groups of the engine support a prefix that ends there
  cpu, disk    a tier: blocks that the engine loads from there into the GPU's memory
A tier may be a store that several engines read, such as a folder in a network file system: then its set in the record
has the field `store`, a name that the engines agree on. The key `stores` (store -> slot) gives all of them one slot,
whose blocks are those that any of them reports: such a set has no digest and no snapshot. It ends with its last reader.

Takes a list of the keys sets, tiers, retired, digest and stores, and the worker's id. Returns
  kinds: by kind its number, the begin of the keys that hold the slots of a hash (forward), what stands behind the
    slot's number in the key of its hashes and in `retired` (mark), and ps_per_byte: the picoseconds that loading a byte
    takes until the engine has measured that
  retire(kind, set): lets collect remove what the set holds
  drop(record, kept): does that with all sets of the record, and removes their entries in `sets` and `tiers`; but stores
    that others read, or that are among the sets `kept` (nil: none), stay
  publish(record, slot): writes the sets of the record into `sets`, and tiers into `tiers`, too, by their slots, where
    decide reads them; slot: of the main set
--]]
local call = redis.call
local KINDS = {
  ends = { number = KIND_OF_ENDS, forward = "e:", mark = ":e", ps_per_byte = 0 },
  cpu = { number = 1, forward = "b:", mark = "", ps_per_byte = 40 },
  disk = { number = 2, forward = "b:", mark = "", ps_per_byte = 200 },
}

return function(keys, worker_id)
  local sets_key, tiers_key, retired_key, digest_key, stores_key = unpack(keys)

  local function retire(kind, set)
    call("SADD", retired_key, string.format("%d", set.slot) .. KINDS[kind].mark)
    call("HDEL", digest_key, worker_id .. ":" .. kind)
    call("HDEL", tiers_key, string.format("%d", set.slot))
  end

  -- Write who reads a store, by what `sets` has of it; returns whether anybody does.
  local function note_readers(slot)
    local readers = {}
    for _, packed in ipairs(call("HVALS", sets_key)) do
      local of, main, seconds, number = struct.unpack(FURTHER_SET, packed)
      if of == slot then readers[#readers + 1] = struct.pack(TIER, main, seconds, number, 0) end
    end
    if readers[1] then call("HSET", tiers_key, string.format("%d", slot), table.concat(readers)) end
    return readers[1] ~= nil
  end

  local function drop(record, kept)
    for kind, set in pairs(record.sets or {}) do
      call("HDEL", sets_key, worker_id .. ":" .. kind)
      local next_set = kept and kept[kind]
      local is_read = set.store and note_readers(set.slot)
      local stays = is_read or set.store and next_set and next_set.store == set.store
      if set.store and not stays then call("HDEL", stores_key, set.store) end
      if KINDS[kind] and not stays then retire(kind, set) end -- another version of Warmfleet may know further kinds
    end
  end

  local function publish(record, slot)
    for kind, known in pairs(record.sets and KINDS or {}) do
      local set = record.sets[kind]
      local seconds = set and (set.bytes_per_token or 0) * (set.ps_per_byte or known.ps_per_byte) / 1e12
      if kind == "ends" then seconds = set and set.promises_all or 0 end
      local number = known.number + (set and set.loads_last == 1 and LOADS_LAST or 0)
        + (set and set.loads_dropped == 1 and LOADS_DROPPED or 0)
      local packed = set and struct.pack(FURTHER_SET, set.slot, slot, seconds, number)
      if packed then call("HSET", sets_key, worker_id .. ":" .. kind, packed) end
      if packed and set.store then
        note_readers(set.slot)
      elseif packed and kind ~= "ends" then
        local blocks = set.capacity_blocks or record.capacity_blocks
        call("HSET", tiers_key, string.format("%d", set.slot), struct.pack(TIER, slot, seconds, number, blocks))
      end
    end
  end

  return KINDS, retire, drop, publish
end
