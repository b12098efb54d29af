--[[
collect: removes the index entries of retired slots (numbers of workers' former incarnations), a bounded piece a call.

Guarantee: touches retired slots only: no row names them, no script writes to them, and their numbers are never used
again. A slot leaves `retired` with its last entry.

ARGV: prefix, max_blocks
Returns: {number of entries that were removed, number of retired slots that are left}
Cost: O(max_blocks)
Keys that depend on data: b:<hash>, e:<hash>, s:<slot>, x:<hash>, lru:<slot>
--]]
local retired_key = unpack(KEYS)
local prefix, max_blocks = ARGV[1], tonumber(ARGV[2])
local SLOT_BLOCKS = 8 -- part of max_blocks that each removed slot takes, so that one call removes few slots
local call = redis.call

local room, removed = max_blocks, 0
while room > 0 do
  local slot = call("SRANDMEMBER", retired_key)
  if not slot then break end
  local hashes = call("SPOP", prefix .. "s:" .. slot, room)
  local number, mark = slot:match("^(%d+)(.*)$") -- a set of ends has a mark (shared/further_sets)
  local forward = prefix .. (mark == "" and "b:" or "e:")
  for _, hash in ipairs(hashes) do call("SREM", forward .. hash, number) end
  local mirrored = room > #hashes and call("ZPOPMIN", prefix .. "lru:" .. slot, room - #hashes) or {}
  for i = 1, #mirrored, 2 do -- block hashes at which x: counts this worker's guessed cache (settle/mirror)
    local key = prefix .. "x:" .. mirrored[i]
    call("HDEL", key, slot .. MARK_TRAIL)
    if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. MARK_MAKER) end
  end
  local taken = #hashes + #mirrored / 2
  removed = removed + taken
  if taken >= room then break end -- the slot may hold more blocks
  call("UNLINK", prefix .. "s:" .. slot, prefix .. "lru:" .. slot)
  call("SREM", retired_key, slot)
  room = room - taken - SLOT_BLOCKS
end
return { removed, call("SCARD", retired_key) }
