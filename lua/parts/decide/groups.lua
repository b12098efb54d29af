--[[
decide/groups: cuts what hybrid workers hold of a prompt to what they can reuse: their engines reuse a prefix only up to
a block at which all KV cache groups support it, an end (shared/further_sets).

Guarantee: only reads. Looks at MOST_SEEN blocks at most in one decision; a match that is not settled by then counts
as 0, and `short` becomes 1.
Takes the key prefix, the key `sets` (packed: FURTHER_SET), and the number of tiers in there. Returns nil if none is a
set of ends; else a table:
  short: 0, or 1 once a match may be a lower bound
  last_end(slot, hashes, depth): the last block, up to this depth, up to which the worker with this slot can reuse the
    chain; 0: none. The depth itself if the worker has no set of ends
  cut(slots, hashes, depths): puts last_end in place of each depth in the table (by candidate); removes it if it is 0
  sparse(slot): true if a prompt that is computed leaves an end at its last whole block only
--]]
local call, sub, format = redis.call, string.sub, string.format
local max, min = math.max, math.min
local MOST_SEEN, FIRST_BLOCKS, MOST_AT_ONCE = 16384, 32, 512
local MANY = 3 -- candidates of one depth from which on their ends are read by the block's key, in one call

return function(prefix, sets_key, tiers)
  if call("HLEN", sets_key) == tiers then return nil end
  local ends, left = {}, MOST_SEEN -- ends: by the slot of a worker's main set
  for _, packed in ipairs(call("HVALS", sets_key)) do
    local slot, main, dense, kind = struct.unpack(FURTHER_SET, packed)
    if kind == KIND_OF_ENDS then
      slot = format("%d", slot)
      ends[main] = { key = prefix .. "s:" .. slot .. ":e", slot = slot, sparse = dense == 0 }
    end
  end
  if not next(ends) then return nil end
  local found = { short = 0 }

  function found.last_end(slot, hashes, depth)
    local set, size = ends[slot], FIRST_BLOCKS
    while set and depth > 0 do
      if left <= 0 then
        found.short = 1
        return 0
      end
      local last, chunk = max(1, depth - size + 1), {}
      for block = depth, last, -1 do chunk[depth - block + 1] = sub(hashes, block * 8 - 7, block * 8) end
      for k, is_end in ipairs(call("SMISMEMBER", set.key, unpack(chunk))) do
        if is_end == 1 then return depth - k + 1 end
      end
      left, depth, size = left - #chunk, last - 1, min(4 * size, MOST_AT_ONCE)
    end
    return depth
  end

  function found.cut(slots, hashes, depths)
    local count, settled = {}, {}
    for i, depth in pairs(depths) do
      if ends[slots[i]] then count[depth] = (count[depth] or 0) + 1 end
    end
    for depth, candidates in pairs(count) do
      local key = prefix .. "e:" .. sub(hashes, depth * 8 - 7, depth * 8)
      for _, slot in ipairs(candidates >= MANY and call("SMEMBERS", key) or {}) do
        settled[depth .. ":" .. slot] = true
      end
    end
    for i, depth in pairs(depths) do
      local set = ends[slots[i]]
      if set and not settled[depth .. ":" .. set.slot] then
        local last = found.last_end(slots[i], hashes, depth)
        depths[i] = last > 0 and last or nil
      end
    end
  end

  function found.sparse(slot) return ends[slot] and ends[slot].sparse end

  return found
end
