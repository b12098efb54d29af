--[[
collect: remove the entries of retired slots, a bounded piece at a time.

Guarantee: touches retired slots only: no row names them, nothing writes to them, their numbers are never used again.
The slot leaves `retired` with its last entry.

KEYS: retired
ARGV: prefix, max_blocks
Returns: {removed, retired slots left}
Cost: O(max_blocks)
Keys that depend on data: b:<hash>, s:<slot>, x:<hash>, lru:<slot>
--]]
local RETIRED, PREFIX, MAX_BLOCKS = KEYS[1], ARGV[1], tonumber(ARGV[2])
local call = redis.call

local slot = call("SRANDMEMBER", RETIRED)
if not slot then return { 0, 0 } end
local hashes = call("SPOP", PREFIX .. "s:" .. slot, MAX_BLOCKS)
for _, hash in ipairs(hashes) do call("SREM", PREFIX .. "b:" .. hash, slot) end
local room = MAX_BLOCKS - #hashes
local mirrored = room > 0 and call("ZPOPMIN", PREFIX .. "lru:" .. slot, room) or {}
for i = 1, #mirrored, 2 do -- the mirror of an approximate worker: one count of its own per checkpoint
  local key = PREFIX .. "x:" .. mirrored[i]
  call("HDEL", key, slot .. "=")
  if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. "+") end
end
local removed = #hashes + #mirrored / 2
if removed < MAX_BLOCKS then
  call("UNLINK", PREFIX .. "s:" .. slot, PREFIX .. "lru:" .. slot)
  call("SREM", RETIRED, slot)
end
return { removed, call("SCARD", RETIRED) }
