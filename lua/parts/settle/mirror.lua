--[[
settle/mirror: notes in the mirror of an approximate worker that it was sent a prompt.

The index cannot know what such a worker holds, so it notes what the worker was sent. The oldest prompt and its deepest
block are given up first. Each checkpoint keeps a trail, the hashes up to the next checkpoint; a longer chain lengthens
it.

Takes the key prefix, the reservation's id, its lease, the capacity of the worker in checkpoints, and the server's time
as TIME gives it.
--]]
local call = redis.call
local LEASE, MARK_MAKER, MARK_TRAIL, MIRROR_EVICTIONS = ">I4I4I4I4I4I4BB", "+", "=", 64

return function(prefix, id, lease, capacity, time)
  local _, slot, _, _, _, _, _, length, at = struct.unpack(LEASE, lease)
  slot = string.format("%d", slot)
  local lru, added, depth, here = prefix .. "lru:" .. slot, 0, 0, 1
  local chain = call("GET", prefix .. "c:" .. slot .. ":" .. id) or ""
  for from = at + length, #lease, 8 do
    local hash, there = lease:sub(from, from + 7), chain:find(lease:sub(from + 8, from + 15), here + 8, true)
    local key, trail = prefix .. "x:" .. hash, chain:sub(here + 8, (there or 0) + 7)
    depth = depth + 1
    if call("ZADD", lru, string.format("%.0f", time[1] * 1000000 + time[2] - depth), hash) == 1 then
      added = added + 1
      call("HINCRBY", key, slot, 1)
      call("HSET", key, slot .. MARK_TRAIL, trail)
    elseif #trail > call("HSTRLEN", key, slot .. MARK_TRAIL) then
      local kept = call("HGET", key, slot .. MARK_TRAIL) or ""
      if trail:sub(1, #kept) == kept then call("HSET", key, slot .. MARK_TRAIL, trail) end
    end
    here = there or here
  end
  local over = math.min(call("ZCARD", lru) - capacity, added + MIRROR_EVICTIONS)
  if over <= 0 then return end
  local evicted = call("ZPOPMIN", lru, over)
  for i = 1, #evicted, 2 do
    local key = prefix .. "x:" .. evicted[i]
    call("HDEL", key, slot .. MARK_TRAIL)
    if call("HINCRBY", key, slot, -1) <= 0 then call("HDEL", key, slot, slot .. MARK_MAKER) end
  end
end
