--[[
shared/further_sets: the sets of blocks that a worker may report beside its main one, which is what routers match on
the GPU. Each has a slot of its own, which stands in the key `sets` and in the worker's record (`sets`, by kind).
  ends         blocks at which all KV cache groups of the engine support a prefix that ends there
  cpu, disk    a tier: blocks that the engine loads from there into the GPU's memory

Takes the keys sets, tiers, retired and digest, and the worker's id. Returns
  kinds: by kind its number, the begin of the keys that hold the slots of a hash (forward), what stands behind the
    slot's number in the key of its hashes and in `retired` (mark), and ps_per_byte: the picoseconds that loading a byte
    takes until the engine has measured that
  retire(kind, set): lets collect remove what the set holds
  drop(record): does that with all sets of the record, and removes their entries in `sets` and `tiers`
  publish(record, slot): writes the sets of the record into `sets`, and tiers into `tiers`, too, by their slots, where
    decide reads them; slot: of the main set
--]]
local call = redis.call
local KINDS = {
  ends = { number = KIND_OF_ENDS, forward = "e:", mark = ":e", ps_per_byte = 0 },
  cpu = { number = 1, forward = "b:", mark = "", ps_per_byte = 40 },
  disk = { number = 2, forward = "b:", mark = "", ps_per_byte = 200 },
}

return function(sets_key, tiers_key, retired_key, digest_key, worker_id)
  local function retire(kind, set)
    call("SADD", retired_key, string.format("%d", set.slot) .. KINDS[kind].mark)
    call("HDEL", digest_key, worker_id .. ":" .. kind)
    call("HDEL", tiers_key, string.format("%d", set.slot))
  end

  local function drop(record)
    for kind, set in pairs(record.sets or {}) do
      if KINDS[kind] then retire(kind, set) end -- another version of Warmfleet may know further kinds
      call("HDEL", sets_key, worker_id .. ":" .. kind)
    end
  end

  local function publish(record, slot)
    for kind, known in pairs(record.sets and KINDS or {}) do
      local set = record.sets[kind]
      local seconds = set and (set.bytes_per_token or 0) * (set.ps_per_byte or known.ps_per_byte) / 1e12
      if kind == "ends" then seconds = set and set.promises_all or 0 end
      local packed = set and struct.pack(FURTHER_SET, set.slot, slot, seconds, known.number)
      if packed then call("HSET", sets_key, worker_id .. ":" .. kind, packed) end
      if packed and kind ~= "ends" then
        local blocks = set.capacity_blocks or record.capacity_blocks
        call("HSET", tiers_key, string.format("%d", set.slot), struct.pack(TIER, slot, seconds, known.number, blocks))
      end
    end
  end

  return KINDS, retire, drop, publish
end
