--[[
shared/release_speculation: stops counting a reservation as one that will compute blocks (keys x: and c:).

Takes the key prefix. Returns a function of the reservation's id and its lease, which lists the checkpoints.
--]]
local call = redis.call

return function(prefix)
  return function(id, lease)
    local _, slot, _, _, _, _, _, length, at = struct.unpack(LEASE, lease)
    slot = string.format("%d", slot)
    call("UNLINK", prefix .. "c:" .. slot .. ":" .. id)
    for from = at + length, #lease, 8 do
      local key = prefix .. "x:" .. lease:sub(from, from + 7)
      if call("HINCRBY", key, slot, "-1") <= 0 then call("HDEL", key, slot, slot .. MARK_MAKER) end
    end
  end
end
